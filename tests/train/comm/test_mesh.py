"""The inner mesh: DTensor over groups that are ended and formed again; slices and digests."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from benchmarks.support.groups import StoreMeeting
from tests.core.plans import make_plan
from tests.strict.group import Strict
from tests.train.crew import ADDRESS, make_group
from torch import nn
from torch.distributed import distributed_c10d

from mainstay_core.base.digest import Digest
from mainstay_core.base.errors import InvalidSpecError, RemoteProtocolError
from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm import group as group_module
from mainstay_train.comm import mesh as comm_mesh
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.connections import Connections
from mainstay_train.comm.gloo import Gloo
from mainstay_train.comm.group import BACKENDS
from mainstay_train.comm.interruptible import newest_of
from mainstay_train.compute import measure
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import inner_mesh
from mainstay_train.exact import optimizer
from mainstay_train.exact.draws import Address
from mainstay_train.exact.slices import Slice
from mainstay_train.model import blocks, split, workload
from mainstay_train.sums import digests

SMALL = {"dim": 32, "layers": 2, "heads": 4, "kvHeads": 2, "hidden": 64, "sequence": 8}
SIZE, SEED, STEP = 2, 5, 3
TYPES = (0, 1)
SLOT = Slot(pod=PodUid("a"), index=0)
ENDS_S = 20.0
"""Within this the threads of a group that was left have ended, on a busy machine as well."""


def warm_up():
    """Import what workers need, and their optimizer's code, once before they are forked."""
    comm_mesh.warm_up()
    state = engine_of(size=1).state
    state.apply([torch.zeros(block.layout.size) for block in state.blocks], 1.0, 0.0)


def config_of(ranks_per_stage=SIZE, stages=1):
    shape = JobShape(
        lanes=1,
        shards_per_lane=2,
        replicas=1,
        min_replicas=1,
        stages=stages,
        ranks_per_stage=ranks_per_stage,
        steps=10,
        seed=SEED,
    )
    return JobConfig(job=JobUid("job"), name="job", shape=shape, entrypoint="", workload={})


def engine_of(index=0, *, size=SIZE, hook=lambda _: None, **options):
    config = config_of(size)
    model = workload.load("", {**SMALL, **options})
    engine = Engine.build(
        model,
        config,
        Loader(model.dataset),
        stage=0,
        num_stages=1,
        device="cpu",
        hook=hook,
        inner=inner_mesh(config, "cpu", index),
    )
    engine.state.initialize(SEED)
    return engine


BACKENDS_OF_CELLS = pytest.mark.parametrize("backend", ["gloo", "strict"])
"""The strict one is as NCCL is: what is aborted ends without an error, and leaves garbage."""


def chain_of(store, index, name="chain", backend="gloo"):
    if backend == "copies":
        BACKENDS[backend] = Copying()
    return ChainGroups(name, None, make_group(store, index, SIZE, name, backend=backend))


def reduced(engine, chain):
    """Compute all types and sum them, as the only replica."""
    engine.compute(TYPES, STEP, chain)
    (partial,) = engine.store.partials
    engine.reduce(None, [Supply(partial=partial, index=0)], [0], 0)
    return engine


def described(engine):
    """What a rank would vote and tell, and its gradient by place in the model-wide tensors."""
    masters = engine.state.masters_digest()
    table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
    ballot = engine.ballot(None, table, 0, SLOT, masters.whole.hex())
    gradients = engine.state.layout.views(engine.reducer.reduced)
    params = [p for block in engine.state.layout.blocks for p in block.params]
    return {
        "copies": ballot.copies,
        "masters": masters.counted(engine.inner).hex(),
        "norms": ballot.norms_sq,
        "stats": ballot.stats,
        "bits": ballot.gradient,
        "gradients": [(p.name, p.part, p.copy, gradients[p.name].numpy().copy()) for p in params],
    }


class Copying(Gloo):
    """gloo as it is for the tensors of a GPU: it reaches copies of them alone."""

    def staged(self, tensor):
        return tensor.clone()


def run_rank(pipe, store, index, options, backend):
    chain = chain_of(store, index, f"chain over {backend}", backend)
    chain.connect()
    pipe.send(described(reduced(engine_of(index, **options), chain)))
    pipe.recv()  # a rank that leaves is lost to one that has not come so far


def run_mesh(crew, backend="gloo", **options):
    workers = [crew.fork(run_rank, crew.store, index, options, backend) for index in range(SIZE)]
    found = [worker.hear() for worker in workers]
    for worker in workers:
        worker.kill()
    return found


@BACKENDS_OF_CELLS
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dropout": 0.1}])
def test_the_parallel_model_is_the_dense_one_in_other_arithmetic(crew, options, backend):
    dense = described(reduced(engine_of(size=1, **options), None))
    ranks = run_mesh(crew, backend, **options)

    total = Digest.zero()
    for rank in ranks:
        total += Digest.parse(rank["masters"])
    assert total.hex() == dense["masters"], "the same first values, each counted once"
    norm = sum(sum(rank["norms"]) for rank in ranks)
    near = 0.05 if "dtype" in options else 1e-4
    assert norm == pytest.approx(sum(dense["norms"]), rel=near)
    for mine, theirs in zip(ranks[0]["stats"], dense["stats"], strict=True):
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=near / 10)
        assert (mine.tokens, mine.data) == (theirs.tokens, theirs.data)
    assert {(s.loss_sum, s.tokens, s.data) for s in ranks[1]["stats"]} == {(None, None, None)}
    wholes = {name: torch.from_numpy(gradient) for name, _, _, gradient in dense["gradients"]}
    covered = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    for index, rank in enumerate(ranks):
        for name, part, copy, gradient in rank["gradients"]:
            assert copy == (part is None)
            whole = wholes[part.name if part else name]
            mine = part.cut(whole) if part else whole
            torch.testing.assert_close(
                torch.from_numpy(gradient),
                mine,
                rtol=near * 10,
                atol=near * whole.abs().max().item(),
            )
            if part or index == 0:
                (part.cut(covered[part.name]) if part else covered[name]).add_(1)
    assert all(bool((count == 1).all()) for count in covered.values()), "each element once"


def run_place(pipe, store, stages, size, position, backend):
    """One rank of a chain, connected as a trainer is, without a quorum around it."""
    if backend == "strict":
        BACKENDS[backend] = Strict()
    config = config_of(size, stages)
    settings = TrainerSettings(
        config=config, pod="a", slot=0, incarnation="a.1", address=ADDRESS, socket="", work_dir=""
    )
    lives = [f"{p}.1" for p in range(stages * size)]
    plan = make_plan({0: lives}, ranks_per_stage=size, quorum=stages)
    connections = Connections(settings, backend)
    connections.adopted, connections.index = plan, position
    connections._gather = StoreMeeting(store)
    stage, index = divmod(position, size)
    model = workload.load("", SMALL)
    engine = Engine.build(
        model,
        config,
        Loader(model.dataset),
        stage=stage,
        num_stages=stages,
        device="cpu",
        hook=lambda _: None,
        inner=inner_mesh(config, "cpu", index),
    )
    engine.state.initialize(SEED)
    chain, is_new = connections.begin_pipeline("")
    if is_new:
        chain.connect()
    first = described(reduced(engine, chain))
    assert connections.pipeline_name == (chain.name if chain else "")
    engine.drop_held()
    kept, is_new = connections.begin_pipeline(connections.pipeline_name)
    assert not is_new
    again = described(reduced(engine, kept))
    assert again["bits"] == first["bits"], "a chain that stays keeps its groups"
    pipe.send(first)
    pipe.recv()  # a rank that leaves is lost to one that has not come so far


@BACKENDS_OF_CELLS
@pytest.mark.parametrize("size", [1, SIZE])
def test_the_bits_of_a_chain_do_not_depend_on_where_stages_are_cut(crew, size, backend):
    found = []
    for stages in (1, 2):
        workers = [
            crew.fork(run_place, crew.store, stages, size, position, backend)
            for position in range(stages * size)
        ]
        places = [worker.hear() for worker in workers]
        gradients = {
            (name, part): gradient.tobytes()
            for place in places
            for name, part, _, gradient in place["gradients"]
        }
        norms = [norm for place in places for norm in place["norms"]]
        losses = [stat.loss_sum for place in places for stat in place["stats"]]
        data = [stat.data for place in places for stat in place["stats"]]
        found.append(
            (
                gradients,
                sorted(norms),
                [loss for loss in losses if loss is not None],
                [d for d in data if d is not None],
            )
        )
        for worker in workers:
            worker.kill()

    assert found[0] == found[1]
    assert len(found[0][2]) == len(found[0][3]) == len(TYPES), "told once by the cell"


def test_what_inner_ranks_hold_in_copies_has_equal_bits_and_the_rest_has_not(crew):
    first, second = run_mesh(crew)
    for backend in ("copies", "strict"):
        others = run_mesh(crew, backend)
        assert [rank["bits"] for rank in others] == [first["bits"], second["bits"]], backend

    assert first["copies"] == second["copies"] != ""
    assert first["bits"] != second["bits"]
    copied = [[g for _, _, copy, g in rank["gradients"] if copy] for rank in (first, second)]
    assert len(copied[0]) == 5, "two norms of each layer, one of the head"
    for mine, theirs in zip(*copied, strict=True):
        assert (mine == theirs).all()


def run_head(pipe, store, index, x, options, chunk):
    chain = chain_of(store, index)
    chain.connect()
    pipe.send(through_head(x, options, chunk, comm_mesh.InnerMesh(size=SIZE, index=index)))
    pipe.recv()


def through_head(x, options, chunk, mesh=comm_mesh.SINGLE):
    """Loss, and the input's gradient, of the model's last block for a numpy array ``x``."""
    model = workload.load("", {**SMALL, **options})
    block = blocks.Block(model.blocks[-1], dtype=model.dtype, inner=mesh)
    block.module.out.chunk_elements = chunk
    block.initialize(SEED)
    targets = torch.arange(x.shape[1])[None] * 7
    tape = block.recompute_loss(torch.from_numpy(x).to(model.dtype), targets, None)
    loss, dx = tape.loss.item(), block.backward_input(tape).float()
    weights = block.layout.views(torch.zeros(block.layout.size))
    block.backward_weight(tape, weights)
    (out,) = (p for p in block.layout.params if p.name == "head.out.weight")
    return loss, dx.numpy(), weights[out.name].numpy(), out.part.start[0] if out.part else 0


@pytest.mark.parametrize(
    ("options", "chunk"), [({}, 1 << 24), ({"vocab": 301}, 700), ({"dtype": "bfloat16"}, 600)]
)
def test_the_loss_of_ranks_that_share_the_vocabulary_has_the_bits_of_one_that_has_it_all(
    crew, options, chunk
):
    x = torch.randn(1, SMALL["sequence"], SMALL["dim"]).numpy()
    workers = [crew.fork(run_head, crew.store, i, x, options, chunk) for i in range(SIZE)]
    loss, dx, weight, _ = through_head(x, options, chunk)
    near = 0.02 if "dtype" in options else 1e-5
    for worker in workers:
        found, theirs_dx, part, first = worker.hear()
        assert found == loss
        assert abs(theirs_dx - dx).max() <= near * abs(dx).max()
        mine = weight[first : first + len(part)]
        assert abs(part - mine).max() <= near * abs(weight).max()
        worker.kill()


def test_weight_gradients_of_parts_are_not_rounded_to_the_type_of_their_operands():
    """One micro-batch: what autograd would yield of these is bf16 to the last bit."""
    mesh = comm_mesh.InnerMesh(size=SIZE)
    measure.play_collectives(mesh)
    model = workload.load("", {**SMALL, "dtype": "bfloat16"})
    block = blocks.Block(model.blocks[1], dtype=model.dtype, inner=mesh)
    block.initialize(SEED)
    x, dy = (torch.randn(1, SMALL["sequence"], SMALL["dim"]).bfloat16() for _ in range(2))
    tape = block.recompute(x, Address(SEED, STEP, 0, 0))
    block.backward_input(tape, dy)
    found = block.layout.views(torch.zeros(block.layout.size))
    block.backward_weight(tape, found)

    comm_mesh.leave()
    matrices = [gradient for gradient in found.values() if gradient.dim() == 2]
    assert len(matrices) == 7
    for gradient in matrices:
        assert (gradient.bfloat16() != gradient).float().mean() > 0.9


def test_a_distributed_parameter_of_a_module_that_takes_whole_ones_is_refused():
    def shard(module, mesh):
        from torch.distributed.tensor import Shard, distribute_tensor

        part = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(part)
        return module

    spec = blocks.BlockSpec(name="l", build=lambda: split.Linear(4, 4), parallelize=shard)
    with pytest.raises(ValueError, match=r"l\.weight is distributed.*takes_parts"):
        blocks.Block(spec, inner=comm_mesh.InnerMesh(size=SIZE))


def form_twice(pipe, store, index, backend):
    engine = engine_of(index)
    for name in ("first", "second"):
        chain = chain_of(store, index, name, backend)
        chain.connect()
        engine.drop_held()
        pipe.send(described(reduced(engine, chain))["bits"])
        pipe.recv()  # all are done with it
        chain.shutdown("the chain is formed again")


@BACKENDS_OF_CELLS
def test_a_mesh_that_is_formed_again_computes_the_same_bits(crew, backend):
    workers = [crew.fork(form_twice, crew.store, index, backend) for index in range(SIZE)]
    found = []
    for _ in range(2):
        found.append([worker.hear() for worker in workers])
        for worker in workers:
            worker.say()
    assert found[0] == found[1]


def threads_of_gloo():
    names = []
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(task, "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def leave_with_an_unwaited_collective(pipe, store, index):
    chain = chain_of(store, index)
    chain.connect()
    there = len(threads_of_gloo())
    functional = torch.ops._c10d_functional
    unwaited = functional.all_reduce(torch.ones(4), "sum", comm_mesh.GROUP_NAME)
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", comm_mesh.GROUP_NAME))
    pipe.send(there)
    pipe.recv()  # the other one has got as far
    chain.shutdown("the chain is formed again")
    del chain
    comm_mesh.leave()
    deadline_s = time.monotonic() + ENDS_S
    while threads_of_gloo() and time.monotonic() < deadline_s:
        time.sleep(0.01)  # nobody tells that a thread has ended
    pipe.send(threads_of_gloo())
    with pytest.raises(RuntimeError, match="the chain is formed again"):
        functional.wait_tensor(unwaited)
    pipe.send("refused")


def test_a_collective_that_nobody_waited_for_keeps_no_group_alive(crew):
    """Else each recovery might leave threads behind that are never idle."""
    workers = [
        crew.fork(leave_with_an_unwaited_collective, crew.store, index) for index in range(SIZE)
    ]
    assert all(worker.hear() > 0 for worker in workers)
    for worker in workers:
        worker.say()
    assert [worker.hear() for worker in workers] == [[], []]
    assert [worker.hear() for worker in workers] == ["refused", "refused"]


def ends_when_told(pipe, chain):
    """The job's gather finds out that a rank is lost, and has the chain ended: NCCL does not."""

    def listen():
        chain.shutdown(pipe.recv())

    threading.Thread(target=listen, daemon=True).start()


def lose_a_rank(pipe, store, index, backend):
    def hook(action):
        if index == 1 and action.type == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine, chain = engine_of(index, hook=hook), chain_of(store, index, backend=backend)
    chain.connect()
    ends_when_told(pipe, chain)
    with pytest.raises(GroupEnded):
        engine.compute(TYPES, STEP, chain)
    pipe.send([(p.first, p.last) for p in engine.store.held()])


@BACKENDS_OF_CELLS
def test_a_collective_that_waits_for_a_lost_rank_ends_and_complete_types_are_kept(crew, backend):
    workers = [crew.fork(lose_a_rank, crew.store, index, backend) for index in range(SIZE)]
    if backend == "strict":
        workers[1].wait_end()
        workers[0].say("a rank is lost")
    assert workers[0].hear() == [(0, 0)]


def wait_for_a_silent_rank(pipe, store, index, backend, lost=False):
    waits = threading.Event()
    if lost:
        group_module.shut = lambda *_, **__: (
            None
        )  # as if gloo had lost it: nothing ends it any more

    def hook(action):
        if action.type == 1 and not waits.is_set():  # over garbage a strict one comes here again
            pipe.send("there")
            pipe.recv() if index == 1 else waits.set()

    engine, chain = engine_of(index, hook=hook), chain_of(store, index, backend=backend)
    chain.connect()
    if index == 0:

        def end():
            waits.wait()
            chain.shutdown("a newer plan takes the chain apart")

        threading.Thread(target=end).start()
    with pytest.raises(GroupEnded) as ended:
        engine.compute(TYPES, STEP, chain)
    pipe.send(str(ended.value))


@BACKENDS_OF_CELLS
def test_another_thread_ends_a_collective_that_waits_for_a_silent_rank(crew, backend):
    workers = [
        crew.fork(wait_for_a_silent_rank, crew.store, index, backend) for index in range(SIZE)
    ]
    assert [worker.hear() for worker in workers] == ["there", "there"]
    assert workers[0].hear() == "a newer plan takes the chain apart"
    if backend == "gloo":  # by its sockets a rank finds out by itself that the other is gone
        workers[1].say()
        assert workers[1].hear()


def tell_while_the_cell_ends(pipe, store, index, backend, has_lengths):
    """Rank 1 tells nothing; the cell's group is ended while rank 0 waits for it."""
    chain = chain_of(store, index, backend=backend)
    inner = comm_mesh.InnerMesh(size=SIZE, index=index)
    chain.connect()
    pipe.send("connected")
    pipe.recv()
    if has_lengths:  # the others have told them, and then end
        comm_mesh.tell_all = lambda *_: ((3,),) * SIZE
    ends = threading.Thread(target=chain.shutdown, args=("a newer plan takes the chain apart",))
    ends.start()
    try:
        said = comm_mesh.exchange_all(b"abc", inner)
    except RuntimeError as error:
        said = str(error)
    ends.join()
    pipe.send(said)


@BACKENDS_OF_CELLS
@pytest.mark.parametrize("has_lengths", [False, True])
def test_what_ranks_of_a_cell_tell_each_other_counts_if_their_group_stands(
    crew, backend, has_lengths
):
    workers = [
        crew.fork(tell_while_the_cell_ends, crew.store, index, backend, has_lengths)
        for index in range(SIZE)
    ]
    assert [worker.hear() for worker in workers] == ["connected"] * SIZE
    workers[0].say()
    assert workers[0].hear() == "a newer plan takes the chain apart"


def stumble(pipe, store, index):
    """Rank 1 keeps the other waiting; code of the model looks up what it is told."""
    inner = comm_mesh.InnerMesh(size=SIZE, index=index)

    def look_up(*_):
        told = comm_mesh._gathered(torch.tensor([index]), inner).tolist()
        [0, 1][told[1 - index]]

    def hook(action):
        if action.type == 1 and not waits.is_set():
            pipe.send("there")
            pipe.recv() if index == 1 else waits.set()

    waits = threading.Event()
    engine, chain = engine_of(index, hook=hook), chain_of(store, index, backend="strict")
    engine.state.blocks[-1].module.register_forward_pre_hook(look_up)
    chain.connect()

    def end():
        waits.wait()
        chain.shutdown("a newer plan takes the chain apart")

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(GroupEnded) as ended:
        engine.compute(TYPES, STEP, chain)
    pipe.send((str(ended.value), type(ended.value.__context__).__name__))
    pipe.send([(p.first, p.last) for p in engine.store.held()])


def test_a_model_that_stumbles_over_what_an_aborted_collective_left_has_not_failed(crew):
    workers = [crew.fork(stumble, crew.store, index) for index in range(SIZE)]
    assert [worker.hear() for worker in workers] == ["there", "there"]
    assert workers[0].hear() == ("a newer plan takes the chain apart", "WorkloadError")
    assert workers[0].hear() == [(0, 0)]


def test_a_collective_that_gloo_has_lost_ends_with_its_group(crew):
    """A write to a rank that has just left fails, and gloo's operation never ends."""
    workers = [
        crew.fork(wait_for_a_silent_rank, crew.store, index, "gloo", index == 0)
        for index in range(SIZE)
    ]
    assert [worker.hear() for worker in workers] == ["there", "there"]
    assert workers[0].hear() == "a newer plan takes the chain apart"
    workers[1].say()
    assert workers[1].hear()


def functional_collectives(index):
    """What each functional collective yields; they are started together."""
    functional, name = torch.ops._c10d_functional, comm_mesh.GROUP_NAME
    mine = torch.arange(4.0) + index
    started = {
        "all_reduce": functional.all_reduce(mine, "sum", name),
        "all_gather": functional.all_gather_into_tensor(mine, SIZE, name),
        "reduce_scatter": functional.reduce_scatter_tensor(mine, "sum", SIZE, name),
        "all_to_all": functional.all_to_all_single(mine, [2, 2], [2, 2], name),
        "broadcast": functional.broadcast(mine, 0, name),
    }
    yielded = {kind: functional.wait_tensor(result).tolist() for kind, result in started.items()}
    return yielded | {"mine": mine.tolist()}


def run_functional_collectives(pipe, store, index, backend):
    chain = chain_of(store, index, f"chain over {backend}", backend)
    chain.connect()
    pipe.send(functional_collectives(index))
    pipe.recv()


def test_functional_collectives_of_a_strict_mesh_yield_what_those_over_gloo_do(crew):
    found = []
    for backend in ("gloo", "strict"):
        workers = [
            crew.fork(run_functional_collectives, crew.store, index, backend)
            for index in range(SIZE)
        ]
        found.append([worker.hear() for worker in workers])
    assert found[0] == found[1]


def run_every_collective(pipe, store, index, copies):
    """Send what each collective yields, then what a message that is late yields."""
    chain = chain_of(store, index, backend="copies" if copies else "gloo")
    chain.connect()
    functional, name = torch.ops._c10d_functional, comm_mesh.GROUP_NAME
    mine = torch.arange(4.0) + index
    yielded = functional_collectives(index)
    group = distributed_c10d._resolve_process_group(name)
    whole = torch.empty(SIZE * 4)
    group._allgather_base(whole, mine).wait()
    part = torch.empty(2)
    group._reduce_scatter_base(part, mine).wait()
    parts = [torch.empty(4) for _ in range(SIZE)]
    group.allgather([parts], [mine]).wait()
    added, root = mine.clone(), mine.clone()
    work = group.allreduce([added])
    work.wait()
    added += 1
    work.wait()  # and nothing is brought once more
    group.broadcast([root]).wait()
    yielded |= {
        "whole": whole.tolist(),
        "part": part.tolist(),
        "parts": [each for tensor in parts for each in tensor.tolist()],
        "added": added.tolist(),
        "root": root.tolist(),
        "mine": mine.tolist(),
    }
    if index == 0:
        pipe.recv()
        group.send([mine], 1, 7).wait()
    else:
        received, waits = torch.empty(4), threading.Event()
        threading.Timer(4 * group_module.LOOK_S, waits.set).start()
        work = group.recv([received], 0, 7)
        threading.Thread(target=lambda: (waits.wait(), pipe.send("late"))).start()
        work.wait()
        yielded["message"] = received.tolist()
    functional.wait_tensor(functional.all_reduce(mine, "sum", name))
    yielded["keeps"] = newest_of(name) is not None
    pipe.send(yielded)
    pipe.recv()


@pytest.mark.parametrize("copies", [False, True])
def test_every_collective_of_a_mesh_yields_what_torchs_own_group_does(crew, copies):
    workers = [crew.fork(run_every_collective, crew.store, index, copies) for index in range(SIZE)]
    assert workers[1].hear() == "late", "a receive has waited for longer than a look takes"
    workers[0].say()
    first, second = (worker.hear() for worker in workers)
    gathered = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
    assert first["all_reduce"] == second["all_reduce"] == [1.0, 3.0, 5.0, 7.0]
    assert first["all_gather"] == second["all_gather"] == first["whole"] == gathered
    assert first["parts"] == second["parts"] == gathered
    assert first["added"] == second["added"] == [2.0, 4.0, 6.0, 8.0]
    assert first["root"] == second["root"] == first["mine"] == [0.0, 1.0, 2.0, 3.0]
    assert second["mine"] == [1.0, 2.0, 3.0, 4.0], "what a collective reads stays"
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([1.0, 3.0], [5.0, 7.0])
    assert (first["part"], second["part"]) == ([1.0, 3.0], [5.0, 7.0])
    assert first["all_to_all"] == [0.0, 1.0, 1.0, 2.0]
    assert second["broadcast"] == second["message"] == [0.0, 1.0, 2.0, 3.0]
    assert not first["keeps"], "the tensors of a collective go with it"


def make_a_mistake(pipe, store, index):
    def hook(action):
        if action.type == 1:
            torch.ones(2) @ torch.ones(3)

    engine, chain = engine_of(index, hook=hook), chain_of(store, index)
    chain.connect()
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        engine.compute(TYPES, STEP, chain)
    pipe.send("told apart")
    pipe.recv()


def test_a_mistake_in_the_model_is_not_taken_for_a_lost_rank(crew):
    workers = [crew.fork(make_a_mistake, crew.store, index) for index in range(SIZE)]
    assert [worker.hear() for worker in workers] == ["told apart"] * SIZE


def test_a_model_that_cannot_be_split_is_refused_by_name():
    mesh = comm_mesh.InnerMesh(size=2)
    one_head = workload.load("", {**SMALL, "kvHeads": 1})

    with pytest.raises(InvalidSpecError, match=r"workload\.config\.kvHeads: is 1, must be a mult"):
        one_head.inner_fingerprint(mesh)
    few_rows = workload.load("", {**SMALL, "vocab": 257})
    with pytest.raises(InvalidSpecError, match=r"vocab: is 257, of which the last .* have 9 each"):
        few_rows.inner_fingerprint(comm_mesh.InnerMesh(size=32))


def test_a_workload_whose_blocks_ignore_the_mesh_is_refused():
    model = workload.load("", SMALL)
    ignoring = tuple(dataclasses.replace(spec, parallelize=None) for spec in model.blocks)
    model = workload.Workload(
        blocks=ignoring,
        dataset=model.dataset,
        activation_shape=model.activation_shape,
        learning_rate=model.learning_rate,
    )

    assert model.inner_fingerprint(comm_mesh.SINGLE) == {}
    with pytest.raises(InvalidSpecError, match="no block of the workload has a `parallelize`"):
        model.inner_fingerprint(comm_mesh.InnerMesh(size=2))


def test_the_fingerprint_names_the_inner_layout_alike_on_every_rank():
    model = workload.load("", SMALL)

    two = [model.inner_fingerprint(comm_mesh.InnerMesh(size=2, index=i))["inner"] for i in range(2)]

    assert two[0] == two[1] != model.inner_fingerprint(comm_mesh.InnerMesh(size=1))
    assert two[0].startswith("2 ranks")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 6)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def by_styles(module, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(module, mesh, styles, src_data_rank=None)


STYLED = blocks.BlockSpec(name="mlp", build=Plain, parallelize=by_styles)


def gradients(block, x, dy):
    """Output and gradients of a block for the numpy arrays ``x`` and ``dy``."""
    block.initialize(SEED)
    tape = block.recompute(torch.from_numpy(x), None)
    y, dx = tape.output.detach(), block.backward_input(tape, torch.from_numpy(dy))
    flat = torch.zeros(block.layout.size)
    views = block.layout.views(flat)
    block.backward_weight(tape, views)
    parts = {p.name: (p.part, views[p.name].numpy()) for p in block.layout.params}
    return y.numpy(), dx.numpy(), parts


def run_styled(pipe, store, index, x, dy):
    chain = chain_of(store, index)
    chain.connect()
    mesh = comm_mesh.InnerMesh(size=SIZE, index=index)
    pipe.send(gradients(blocks.Block(STYLED, inner=mesh), x, dy))
    pipe.recv()


def test_a_users_module_is_parallelised_with_torchs_own_styles(crew):
    x, dy = torch.randn(2, 3, 6).numpy(), torch.randn(2, 3, 6).numpy()
    workers = [crew.fork(run_styled, crew.store, index, x, dy) for index in range(SIZE)]
    y, dx, wholes = gradients(blocks.Block(STYLED), x, dy)
    for worker in workers:
        theirs_y, theirs_dx, parts = worker.hear()
        torch.testing.assert_close(torch.from_numpy(theirs_y), torch.from_numpy(y))
        torch.testing.assert_close(torch.from_numpy(theirs_dx), torch.from_numpy(dx))
        assert {n for n, (part, _) in parts.items() if part is None} == {"mlp.second.bias"}
        for name, (part, gradient) in parts.items():
            whole = torch.from_numpy(wholes[name][1])
            mine = part.cut(whole) if part else whole
            torch.testing.assert_close(torch.from_numpy(gradient), mine)


def test_a_block_that_returns_a_distributed_tensor_is_refused(crew):
    def leaves_it_so(module, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        style = ColwiseParallel(use_local_output=False)
        return parallelize_module(module, mesh, style, src_data_rank=None)

    spec = blocks.BlockSpec(name="linear", build=lambda: nn.Linear(4, 4), parallelize=leaves_it_so)
    block = blocks.Block(spec, inner=comm_mesh.InnerMesh(size=SIZE))

    with pytest.raises(ValueError, match="'linear' must return a plain tensor"):
        block.forward(torch.ones(4), None)


@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((7, 5), (2, 0), (3, 5)),
        ((7, 5), (0, 1), (7, 3)),
        ((7, 5), (2, 1), (4, 3)),
        ((3, 4, 5), (0, 1, 0), (3, 2, 5)),
        ((300, 700), (10, 350), (280, 350)),
        ((2, 90_000), (0, 1), (2, 80_000)),
        ((9,), (4,), (5,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_of_slices_add_up_to_the_whole_tensors(shape, start, size, dtype):
    whole = torch.randn(shape).to(dtype)
    part = Slice(name="w", shape=shape, start=start, size=size)

    total = part.digest("master", part.cut(whole).contiguous())
    for rest in _complement(part):
        total += rest.digest("master", rest.cut(whole).contiguous())

    assert total == digests.tensor_digest("master:w", whole)


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((9,), (4,), (5,)),
        ((7, 5), (2, 0), (3, 5)),
        ((7, 5), (2, 1), (4, 3)),
        ((3, 4, 5), (0, 1, 0), (3, 2, 5)),
        ((30, 700), (10, 350), (2, 350)),
    ],
)
def test_digests_of_pieces_of_a_slice_add_up_to_its_own(shape, start, size, step):
    part = Slice(name="w", shape=shape, start=start, size=size)
    local = torch.randn(size)
    flat, total = local.reshape(-1), Digest.zero()
    for first in range(0, len(flat), step):
        total += part.piece_digest("master", flat[first : first + step], first)
    assert total == part.digest("master", local)


def _complement(part):
    """Slices that together with ``part`` cover the tensor once."""
    rest = []
    low, high = [0] * len(part.shape), list(part.shape)
    for dim, (begin, count) in enumerate(zip(part.start, part.size, strict=True)):
        for first, last in ((low[dim], begin), (begin + count, high[dim])):
            if last > first:
                start = [*part.start[:dim], first, *low[dim + 1 :]]
                size = [*part.size[:dim], last - first, *high[dim + 1 :]]
                rest.append(
                    Slice(name=part.name, shape=part.shape, start=tuple(start), size=tuple(size))
                )
    return rest


def test_parts_of_a_tensor_are_told_apart_and_copies_are_not():
    """A checkpoint has the parts of all inner ranks: each reads its own, and any copy."""
    first, second = (
        {t.id: t.copy for t in engine_of(i).state.state_tensors()} for i in range(SIZE)
    )

    assert {i for i in first if i in second} == {i for i, copy in first.items() if copy}
    assert any("[0:16,0:32]" in i for i in first)


def test_a_scalar_of_the_optimizer_is_counted_once_by_the_mesh():
    states = [engine_of(index).state for index in range(SIZE)]

    for index, state in enumerate(states):
        steps = [t for t in state.state_tensors() if t.kind == "step"]
        assert steps
        assert all(t.copy for t in steps)
        counted = optimizer.Shared.of(steps).counted(comm_mesh.InnerMesh(size=SIZE, index=index))
        assert (counted == Digest.zero()) == (index == 1)


def test_a_length_that_no_rank_of_a_cell_can_mean_is_refused(monkeypatch):
    inner = comm_mesh.InnerMesh(size=2, index=0)
    for length in (comm_mesh.MAX_MESSAGE_BYTES + 1, -1):
        monkeypatch.setattr(comm_mesh, "tell_all", lambda *_, length=length: ((3,), (length,)))
        with pytest.raises(RemoteProtocolError, match=f"inner rank 1 tells {length} bytes"):
            comm_mesh.exchange_all(b"abc", inner)
