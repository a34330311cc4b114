"""What is said of a rank's memory and traffic is what a rank of that job holds and sends."""

import dataclasses
import gc
from dataclasses import dataclass

import pytest
import torch

from mainstay_core.base import codec
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import Cut, Order
from mainstay_core.job import model_sizes
from mainstay_core.job.sizes import llama_sizes, llama_tensors, moe_sizes
from mainstay_core.job.sizes.block_sizes import Measurement, MeasureQuestion
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.rank_sizes import (
    RankSizes,
    StageSizes,
    even_shares,
    largest,
    rank_sizes,
)
from mainstay_core.job.sizes.reduction_sizes import CHUNK, PAD, owned_elements
from mainstay_core.job.spec import parse_training_job
from mainstay_core.job.stages import stage_blocks
from mainstay_core.planning.assignment import plan_reordering
from mainstay_core.planning.partials import grow_all
from mainstay_core.planning.placement import plan_placement
from mainstay_core.planning.program import ANSWER, Op, Receive, compile_compute
from mainstay_core.planning.receipts import receipts_of
from mainstay_core.planning.shares import first_shares
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.comm.chains import Mark
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.comm.operations import Exchange, Pending
from mainstay_train.compute import measure
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import inner_mesh
from mainstay_train.exact import layout as exact_layout
from mainstay_train.exact.buckets import cut
from mainstay_train.exact.layout import BlockLayout, StageLayout
from mainstay_train.model import losses, split, workload
from mainstay_train.models import attention, llama_config, moe_config

TOLERANCE = 0.01
"""Said is 5 %. Scalars and the like are left out; a term that is missing is more than this."""
SMALL = {
    "dim": 32, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 96, "sequence": 40,
    "microBatchSize": 2,
}  # fmt: skip


class PlayedGroup:
    """A group whose peers are not there: it counts what is sent, and holds it as a real one."""

    tells_sent = False

    def __init__(self, rank=0):
        self.sent, self._rank = 0, rank

    @property
    def pipeline(self):
        return self

    def mark(self, moment):
        return Mark(moment, counts=True)

    def send(self, message):
        self.sent += message.tensor.nbytes
        return Pending(Going(), message.tensor, None)

    def receive(self, message):
        message.tensor.zero_()
        return Pending(Going(), message.tensor, message.tensor)

    def send_and_receive(self, sent, received):
        return self.send(sent), self.receive(received)

    def finish(self, pending):
        del pending

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        assert received.numel() == sum(received_sizes)
        assert sent.numel() == sum(sent_sizes)
        self.sent += sent.nbytes - sent_sizes[self._rank] * sent.element_size()
        return Exchange(Going(), received, received, sent)

    def finish_exchange(self, exchange):
        exchange.received.zero_()


class Going:
    """A transfer that is not over before somebody waits for it, as gloo says of its own."""

    def is_completed(self):
        return False


@dataclass
class Case:
    config: dict
    stages: int = 1
    inner: int = 1
    recompute: float = 0.0
    lanes: int = 2
    replicas: int = 2
    shards_per_lane: int = 2
    micro_batches: int = 2
    entrypoint: str = model_sizes.LLAMA

    def job(self):
        return parse_training_job(
            {
                "apiVersion": "mainstay.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "sizes"},
                "spec": {
                    "training": {
                        "steps": 1,
                        "lanes": self.lanes,
                        "shardsPerLane": self.shards_per_lane,
                    },
                    "parallelism": {
                        "replicas": self.replicas,
                        "stages": self.stages,
                        "ranksPerStage": self.inner,
                    },
                    "pipeline": {"microBatches": self.micro_batches},
                    "runtime": {
                        "recompute": self.recompute > 0,
                        "recomputeShare": float(self.recompute or 1),
                        "device": "CPU",
                    },
                    "workload": {
                        "entrypoint": self.entrypoint,
                        "config": self.config,
                    },
                },
            }
        ).to_job_config(JobUid("sizes"))


MIXER = "examples/custom_model.py:workload"
CASES = {
    "one rank": Case(SMALL, lanes=1, replicas=1, shards_per_lane=1, micro_batches=1),
    "bfloat16": Case({**SMALL, "dtype": "bfloat16"}, stages=2),
    "three stages, several shards": Case(SMALL, stages=3, shards_per_lane=3, micro_batches=3),
    "recompute": Case(SMALL, stages=2, recompute=1.0),
    "six stages, recompute": Case(
        {**SMALL, "layers": 5, "sequence": 8}, stages=6, recompute=1.0, lanes=1, replicas=1,
        shards_per_lane=1, micro_batches=7,
    ),
    "recompute half": Case({**SMALL, "layers": 4}, stages=2, recompute=0.5),
    "a lane without a replica": Case(SMALL, lanes=3, replicas=2, shards_per_lane=3),
    "two inner ranks": Case({**SMALL, "vocab": 301}, stages=2, inner=2),
    "two inner ranks, recompute": Case({**SMALL, "dtype": "bfloat16"}, inner=2, recompute=1.0),
    "long sequence": Case({**SMALL, "sequence": 160, "microBatchSize": 1}),
    "explicit attention": Case({**SMALL, "sequence": 160, "attention": "explicit"}),
    "large matrices": Case({**SMALL, "dim": 256, "sequence": 8, "hidden": 700, "layers": 1}),
    "measured": Case({"width": 32, "layers": 3}, stages=2, entrypoint=MIXER),
    "measured, recompute": Case({"width": 32, "layers": 3}, recompute=1.0, entrypoint=MIXER),
}  # fmt: skip


EXPERTS = {
    **SMALL, "experts": 4, "activeExperts": 4, "sharedExperts": 1, "expertHidden": 24,
    "denseLayers": 1,
}  # fmt: skip
"""Every token takes all experts, so that each has as many tokens as formulas say of any routing."""
CASES |= {
    "experts": Case(EXPERTS, stages=2, entrypoint=model_sizes.MOE),
    "experts, bfloat16": Case(
        {**EXPERTS, "dtype": "bfloat16", "attention": "explicit"}, stages=3, micro_batches=3,
        entrypoint=model_sizes.MOE,
    ),
    "experts, recompute": Case(EXPERTS, recompute=1.0, entrypoint=model_sizes.MOE),
}  # fmt: skip
MIXTURES = [
    {},
    {"dtype": "bfloat16"},
    {"router": "softmax", "gates": "plain", "balanceLoss": "sequence", "biasRate": 0.0},
    {"sharedExperts": 0, "dropout": 0.1},
    {"experts": 32, "activeExperts": 32, "expertHidden": 8, "denseLayers": 0, "sequence": 12},
    {"dtype": "bfloat16", "sharedExperts": 2, "router": "softmax", "balanceLoss": "sequence"},
    {"experts": 1, "activeExperts": 1, "gates": "plain", "expertHidden": 64},
    {"experts": 64, "activeExperts": 2, "expertHidden": 4, "dim": 16, "sequence": 100},
    {
        "experts": 64, "activeExperts": 2, "expertHidden": 4, "dim": 16, "sequence": 100,
        "dtype": "bfloat16", "router": "softmax", "sharedExperts": 0,
    },
]  # fmt: skip
"""What differs from the small model with experts."""
BLOCKS = [
    (1, {"dtype": "bfloat16", "dropout": 0.1}),
    (1, {"dropout": 0.1, "kvHeads": 1}),
    (1, {"microBatchSize": 1, "kvHeads": 4, "dtype": "bfloat16"}),
    (1, {"sequence": 200, "hidden": 33, "vocab": 1000}),
    (1, {"attention": "explicit", "dtype": "bfloat16", "dropout": 0.1}),
    (1, {"attention": "explicit", "microBatchSize": 1, "kvHeads": 4}),
    (1, {"microBatchSize": 40, "vocab": 12_000, "dtype": "bfloat16"}),
    (2, {"kvHeads": 4, "dropout": 0.1}),
    (2, {"microBatchSize": 40, "vocab": 12_001}),
    (2, {"microBatchSize": 1, "vocab": 301, "dtype": "bfloat16", "attention": "explicit"}),
]
"""Ranks of a stage, and what differs from the small model."""


def forget_constants():
    """Have masks and rotations made again: they last as long as a process."""
    attention._causal_mask.cache_clear()
    attention._rotations.cache_clear()


def types_of(config):
    """Shard types of each replica, as the first plan has them."""
    shape = config.shape
    hosts = plan_placement(shape.lanes, shape.shards_per_lane, None).hosts
    suppliers = plan_reordering(
        hosts, range(shape.replicas), None, shape.shards_per_lane, shape.lanes
    ).suppliers
    return [[t for t, r in enumerate(suppliers) if r == mine] for mine in range(shape.replicas)]


def storages(thing):
    """Bytes of all tensors that an object leads to, each memory once."""
    found, seen, todo = {}, set(), [thing]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif type(value).__module__.startswith("mainstay") or isinstance(
            value, dict | list | tuple
        ):
            todo += gc.get_referents(value)
    return found


def run(case, config, replica, stage, inner):
    """Allocate a rank and run its step; return what it holds and sends."""
    shape = config.shape
    model = workload.load(config.entrypoint, config.workload)
    mesh = inner_mesh(config, "cpu", inner)
    if mesh.size > 1:
        measure.play_collectives(mesh)
    engine = Engine.build(
        model, config, Loader(model.dataset, ahead=False), stage=stage, num_stages=shape.stages,
        device="cpu", hook=[].append, inner=mesh,
    )  # fmt: skip
    engine.state.initialize(0)
    types = types_of(config)
    program = compile_compute(types[replica], shape.micro_batches, stage, shape.stages, shape.order)
    engine.interpreter.run(program, 0, PlayedGroup())
    engine.drop_held()  # its buffers stay: what comes next is activations alone
    forget_constants()
    pipeline, cells = PlayedGroup(), PlayedGroup(replica)
    with measure.LiveBytes(mesh.size) as live:
        engine.interpreter.run(program, 0, pipeline)
        activations, sent_inner = live.peak, live.sent
    table = [
        Supply(index=index, partial=partial)
        for index, mine in enumerate(types)
        for partial in grow_all((), mine, shape.shards_per_lane)
    ]
    members = range(shape.replicas)
    engine.reducer.reduce(
        cells if shape.replicas > 1 else None, sorted(table, key=lambda s: s.partial),
        [*members], replica, engine.store.partials,
    )  # fmt: skip
    state, store, reducer = engine.state, engine.store, engine.reducer
    of_reducer = storages(reducer)
    reduced = of_reducer.pop(reducer.reduced.data_ptr())
    compute = [b.compute for b in state.blocks if b.compute is not b.masters]
    scaled = {
        p.grad.untyped_storage() for t in state.state_tensors() if (p := t.tensor).grad is not None
    }
    return RankSizes(
        replica=replica,
        stage=stage,
        inner=inner,
        num_parameters=sum(block.layout.num_parameters for block in state.blocks),
        parameters_bytes=sum(flat.nbytes for flat in compute),
        masters_bytes=sum(f.tensor.nbytes for f in state.flats() if f.kind == "master"),
        moments_bytes=sum(f.tensor.nbytes for f in state.flats() if f.kind != "master"),
        gradients_bytes=store.scratch.nbytes + reduced + max(s.nbytes() for s in scaled),
        partials_bytes=sum(flat.nbytes for flat in store.partials.values()),
        reduction_bytes=sum(of_reducer.values()),
        activations_bytes=activations,
        sent_pipeline_bytes=pipeline.sent,
        sent_reduction_bytes=cells.sent,
        sent_inner_bytes=sent_inner,
    )


def said(case, config, inner):
    accumulates = case.micro_batches > 1
    if case.entrypoint in model_sizes.BUILT_IN:
        sizes = built_in_sizes(
            case.entrypoint, config.workload, case.inner, inner, accumulates=accumulates
        )
    else:
        model = workload.load(config.entrypoint, config.workload)
        sizes = measure.measure(model, inner_mesh(config, "cpu", inner), accumulates=accumulates)
    shares = first_shares(config.shape, None)
    return rank_sizes(
        sizes, config.shape, shares, recompute=case.recompute, bucket_bytes=config.bucket_bytes
    )


@pytest.mark.parametrize("name", CASES)
def test_each_line_is_what_a_rank_really_holds_and_sends(name):
    case = CASES[name]
    config = case.job()
    inner = case.inner - 1
    mine = [r for r in said(case, config, inner) if r.replica == case.replicas - 1]
    assert len(mine) == case.stages
    for expected in mine:
        real = run(case, config, expected.replica, expected.stage, inner).as_json()
        for line, size in expected.as_json().items():
            assert size == pytest.approx(real[line], rel=TOLERANCE), (line, expected, real)


@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_rank_of_a_swapped_pipeline_holds_no_more_than_is_said(recompute):
    case = dataclasses.replace(
        CASES["three stages, several shards"], micro_batches=2, recompute=recompute
    )
    config = case.job()
    shape = dataclasses.replace(config.shape, order=Order.SWAPPED, cut=Cut.EQUAL)
    config = dataclasses.replace(config, shape=shape)
    for expected in [r for r in said(case, config, 0) if r.replica == 0]:
        real = run(case, config, 0, expected.stage, 0).as_json()
        told = expected.as_json()
        for bound in ("activations_bytes", "memory_bytes"):
            assert real[bound] <= told.pop(bound)
        for line, size in told.items():
            assert size == pytest.approx(real[line], rel=TOLERANCE), (line, expected, real)


@pytest.mark.parametrize(("ranks", "more"), BLOCKS)
def test_formulas_of_each_block_are_what_is_measured(ranks, more):
    config = {**SMALL, "layers": 1, **more}
    mesh = InnerMesh(size=ranks, index=ranks - 1)
    computed = llama_sizes.sizes_of(config, ranks, mesh.index, accumulates=True)
    compare(workload.load("", config), mesh, computed)


@pytest.mark.parametrize("more", MIXTURES, ids=str)
def test_formulas_of_experts_are_what_is_measured(more):
    config = {**EXPERTS, "layers": 2, **more}
    computed = moe_sizes.sizes_of(config, 1, 0, accumulates=True)
    compare(workload.load(model_sizes.MOE, config), InnerMesh(size=1, index=0), computed)


def compare(model, mesh, computed):
    forget_constants()
    measured = measure.measure(model, mesh)
    assert (measured.width_bytes, measured.tokens_bytes, measured.targets_bytes) == (
        computed.width_bytes, computed.tokens_bytes, computed.targets_bytes,
    )  # fmt: skip
    for block, known in zip(measured.blocks, computed.blocks, strict=True):
        assert sorted(known.parameters) == sorted(block.parameters)
        for line in dataclasses.fields(block):
            real, size = getattr(block, line.name), getattr(known, line.name)
            if line.name.endswith("_bytes"):
                # Scalars and a vocabulary's padding are left out.
                assert size == pytest.approx(real, rel=0.01, abs=600), (block.name, line.name)


def test_largest_is_taken_line_by_line():
    case = CASES["a lane without a replica"]
    ranks = said(case, case.job(), 0)
    most = largest(ranks)
    assert most.partials_bytes == max(r.partials_bytes for r in ranks)
    assert most.reduction_bytes == max(r.reduction_bytes for r in ranks)
    bound = rank_sizes(
        llama_sizes.sizes_of(case.config, 1, 0, accumulates=True), case.job().shape,
        even_shares(case.job().shape), recompute=False,
    )  # fmt: skip
    assert all(
        size <= largest(bound).as_json()[line]
        for line, size in most.as_json().items()
        if line.endswith("_bytes")
    )


def test_owned_elements_are_those_of_the_reduction():
    layout = StageLayout(
        blocks=(
            BlockLayout.of("first", {"weight": (70_000,), "bias": (17,)}),
            BlockLayout.of("second", {"weight": (400, 500)}),
            BlockLayout.of("third", {"weight": (5,)}),
        )
    )
    sizes = [block.size for block in layout.blocks]
    for cells in range(1, 9):
        lengths = [chunk.stop - chunk.start for chunk in layout.chunks()]
        for bucket_bytes in (1, 3 * CHUNK * 4, layout.size * 4 + (1 << 20)):
            buckets = cut(lengths, bucket_bytes, cells)
            for index in range(cells):
                owned = owned_elements(sizes, index, cells, bucket_bytes)
                assert owned == sum(bucket.sizes[index] for bucket in buckets)
    assert CHUNK == exact_layout.CHUNK
    assert PAD == exact_layout.PAD


@pytest.mark.parametrize("stages", [3, 6, 7])
def test_the_most_is_there_when_the_last_forward_has_begun(stages):
    """The closed form against a walk through the program, action by action."""
    case = CASES["three stages, several shards"]
    config = {**case.config, "layers": 5}
    for recompute in (False, True):
        for flows in range(1, stages + 5):
            shape = dataclasses.replace(
                case.job().shape, lanes=1, replicas=1, stages=stages, micro_batches=flows
            )
            sizes = llama_sizes.sizes_of(config, 1, 0, accumulates=True)
            for number, blocks in enumerate(stage_blocks([b.cost for b in sizes.blocks], stages)):
                stage = StageSizes(sizes, blocks, shape, number, recompute=recompute)
                assert stage.activations(flows) == walked(stage, flows)


def walked(stage, flows):
    """The most of a step whose sends stay until their receipts come."""
    place = (stage.number, stage.shape.stages)
    receipts = receipts_of((0,), flows, *place, Order.IN_ORDER)
    under_way, sent, peaks = [], [], []

    def held(but=None):
        """What micro-batches under way keep, and gradients that were sent; less those of one."""
        outputs = {a.micro_batch for a in sent if a.op is Op.SEND_F}
        here = [
            stage.waiting_bytes - stage.again[-1] * stage.output_bytes * (each not in outputs)
            for each in under_way
            if each != but
        ]
        gradients = [a for a in sent if a.op is Op.SEND_B and a.micro_batch != but]
        return sum(here) + len(gradients) * stage.returned_bytes

    comes = 0
    for action in compile_compute((0,), flows, *place):
        mine = action.micro_batch
        if action.op is Op.FORWARD:
            peaks.append(held() + max(stage.forward_peaks()))
            under_way.append(mine)
        elif action.op is Op.RECV_B:
            peaks.append(held() + stage.output_bytes)
        elif action.op is Op.BACKWARD_INPUT:
            peaks.append(held(mine) + max(stage.backward_peaks()))
        elif action.op is Op.BACKWARD_WEIGHT:
            peaks.append(held(mine) + max(stage.weights_peaks()) + comes)
            under_way.remove(mine)
        elif action.op in ANSWER:
            sent.append(action)
            comes = stage.input_bytes * (action.op is Op.SEND_B and action.posts is not None)
        told = receipts.get(Receive(action.op, 0, mine, action.visit, action.peer), ())
        sent = [each for each in sent if each not in told]
    return stage.constant_bytes + max(peaks)


def test_keys_and_types_are_those_of_the_model():
    assert {*llama_config.keys_of(llama_config.LlamaConfig), "data"} == llama_sizes.KEYS
    assert {*llama_config.keys_of(moe_config.MoeConfig), "data"} == moe_sizes.KEYS
    assert moe_config.ROUTERS == moe_sizes.ROUTERS
    assert moe_config.GATES == moe_sizes.GATES
    assert moe_config.BALANCE_LOSSES == moe_sizes.BALANCE_LOSSES
    assert attention.FORMS == llama_sizes.ATTENTION
    assert losses.CHUNK_ELEMENTS == llama_tensors.LOGITS
    assert split.WIDENED_ELEMENTS == llama_tensors.WIDENED_ELEMENTS
    assert {name: t.itemsize for name, t in workload.DTYPES.items()} == llama_sizes.WIDTHS


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"entrypoint": "examples/own_loop.py:train"}, "is a training loop of its own"),
        ({"config": {"widht": 3}}, "workload.config.widht: is unknown"),
        ({"ranks_per_stage": 2}, "no block of the workload has a `parallelize`"),
        ({"args": ("x",)}, "calling the entrypoint: AssertionError: this model takes no arguments"),
    ],
)
def test_what_cannot_be_measured_is_named(changes, problem):
    question = MeasureQuestion(**({"entrypoint": MIXER, "config": {}} | changes))
    answer = measure.answer(question)
    assert problem in answer.problem
    assert answer.models == ()


def test_a_measurement_travels_as_it_is():
    answer = measure.answer(MeasureQuestion(entrypoint=MIXER, config={"width": 16, "layers": 1}))
    assert answer.problem == ""
    assert codec.loads(Measurement, codec.dumps(answer)) == answer
