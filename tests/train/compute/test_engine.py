"""A cell on a device that runs behind its host: what waits for it, and what counts of its work."""

import pytest
import torch
from benchmarks.emulated_accelerator import RandomTokens
from tests.train.played_device import DEVICE, MOMENT, PlayedDevice
from torch import nn

from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.votes import Commit
from mainstay_train.base import device as devices
from mainstay_train.comm.chains import ChainGroups, Mark
from mainstay_train.comm.operations import Exchange, Pending
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.statistics import TypeSums
from mainstay_train.exact import optimizer
from mainstay_train.kernels.calls import UnreliableDeviceError
from mainstay_train.model import blocks, losses, split, workload

SLOT = Slot(pod=PodUid("a"), index=0)
SEQUENCE, WIDTH, MICRO_BATCHES, STEPS = 12, 8, 3, 5
TYPES = (0, 1, 2)


class Layer(nn.Module):
    """A residual product of which address draws drop a part."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = split.RMSNorm(WIDTH), split.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x, address):
        kept = address.uniform(x.shape, "kept", x.device) > 0.1
        return x + self.out(self.norm(x)) * kept + self.shift


def make_model(layers=1):
    spec = blocks.BlockSpec
    return workload.Workload(
        blocks=(
            spec(name="embedding", build=lambda: split.Embedding(256, WIDTH), cost=1),
            *(spec(name=f"layers.{i}", build=Layer, draws=True, cost=1) for i in range(layers)),
            spec(
                name="head",
                cost=1,
                build=lambda: split.Linear(WIDTH, 256),
                loss=losses.cross_entropy_sum,
            ),
        ),
        dataset=RandomTokens(SEQUENCE),
        activation_shape=(1, SEQUENCE, WIDTH),
        learning_rate=optimizer.constant(0.1),
        optimizer=optimizer.each(torch.optim.SGD, momentum=0.9),
    )


def make_engine(device="cpu", stage=0, num_stages=1, *, recompute=False, layers=1, **fields):
    shape = JobShape(
        lanes=2,
        shards_per_lane=2,
        replicas=2,
        min_replicas=1,
        stages=num_stages,
        steps=STEPS,
        seed=3,
        micro_batches=MICRO_BATCHES,
    )
    config = JobConfig(
        job=JobUid("job"),
        name="job",
        shape=shape,
        entrypoint="",
        workload={},
        recompute=recompute,
        **fields,
    )
    model = make_model(layers)
    engine = Engine.build(
        model,
        config,
        Loader(model.dataset, device),
        stage=stage,
        num_stages=num_stages,
        device=str(device),
        hook=lambda _: None,
    )
    engine.state.initialize(3)
    return engine


class Neighbours:
    """The groups of a chain and of a position whose other members answer with zeros at once."""

    tells_sent = True

    def __init__(self, cut_off=()):
        self.pipeline = self
        self._cut_off, self._marks = list(cut_off), []

    def mark(self, moment):
        self._marks.append(Mark(moment))
        return self._marks[-1]

    def judge(self):
        if self._marks:
            self._marks[-1].moment.wait()  # as a chain does: the last one is behind all others
        for number, mark in enumerate(self._marks):
            mark.counts = number not in self._cut_off

    def send(self, message):
        return Pending(self, message.tensor, None)

    def receive(self, message):
        return Pending(self, message.tensor.zero_(), message.tensor)

    def send_and_receive(self, sent, received):
        return self.send(sent), self.receive(received)

    def is_completed(self):
        return True

    def finish(self, pending):
        pass

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        del received_sizes, sent_sizes
        return Exchange(self, received.zero_(), received, sent)

    def finish_exchange(self, exchange):
        pass

    def wait_for(self, moment):
        moment.wait()


def table_of(engine):
    return [Supply(partial=partial, index=0) for partial in engine.store.held()]


def apply(engine, number):
    commit = Commit(step=number, norm=1, scale=1e-2, tokens=1, loss=1, data="0" * 32)
    return engine.apply(commit, 0.1)


def run_step(engine, number, *, chain=None, group=None):
    """What a rank votes, sends and applies in a step."""
    engine.compute(TYPES, number, chain)
    table, members = table_of(engine), [0, 1] if group else [0]
    engine.reduce(group, table, members, 0)
    ballot = engine.ballot(group, table, 0, SLOT, "")
    sent, masters = engine.sent, apply(engine, number)
    engine.drop_held()
    return ballot, sent, masters


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("stage", "num_stages"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_a_step_waits_for_the_device_at_its_vote_and_at_its_apply_alone(
    stage, num_stages, recompute
):
    with PlayedDevice() as device:
        chain = Neighbours() if num_stages > 1 else None
        group = Neighbours()
        engine = make_engine(DEVICE, stage, num_stages, recompute=recompute)
        run_step(engine, 0, chain=chain, group=group)  # what is made once is made
        for number in (1, 2):
            assert device.waited(lambda n=number: engine.compute(TYPES, n, chain)) == []
            table = table_of(engine)
            assert device.waited(lambda t=table: engine.reduce(group, t, [0, 1], 0)) == []
            vote = device.waited(lambda t=table: engine.ballot(group, t, 0, SLOT, ""))
            # What the vote tells is copied behind the host on a device that can, and a moment says
            # when it is there. With a chain another says before whether what it computed counts.
            fetched = ["copy_ to the host", MOMENT]
            assert vote == ([MOMENT] if chain else []) + fetched
            # The next step begins with the digest of what it computes with.
            assert device.waited(lambda n=number: apply(engine, n)) == fetched
            engine.drop_held()


def test_a_step_on_the_played_device_has_the_bits_of_one_on_the_cpu():
    here = make_engine()
    expected = [run_step(here, number) for number in range(2)]
    with PlayedDevice():
        there = make_engine(DEVICE)
        assert [run_step(there, number) for number in range(2)] == expected
    (ballot, sent, _), _ = expected
    assert [stat.tokens for stat in ballot.stats] == [MICRO_BATCHES * SEQUENCE] * len(TYPES)
    assert all(stat.loss_sum > 0 for stat in ballot.stats)
    assert len(sent) == 2


def test_losses_add_up_as_the_hosts_numbers_did_and_nobody_looks():
    losses = [torch.tensor(value) for value in (-0.0, 1e-8, 3.1, 1e8, -7.7, 0.1)]
    total = 0.0
    for loss in losses:
        total += float(loss)
    with PlayedDevice() as device:
        sums = TypeSums()
        there = [loss.to(DEVICE, non_blocking=True) for loss in losses]
        assert device.waited(lambda: [sums.add_loss(loss) for loss in there]) == []
        assert float(sums.loss_sum) == total
    plain = TypeSums()
    for loss in losses:
        plain.add_loss(float(loss))  # as an own loop may give it
    assert plain.loss_sum == total


def test_the_count_sees_whatever_waits_for_a_device():
    with PlayedDevice() as device:
        x = torch.arange(4, dtype=torch.float32, device=DEVICE)
        looks = [
            lambda: float(x[0]),
            lambda: x[1].item(),
            lambda: bool((x > 0).any()),
            lambda: torch.equal(x, x),
            lambda: x[x > 1],
            lambda: x.cpu(),
            lambda: torch.empty(4).copy_(x, non_blocking=True),
            lambda: torch.ones(3).to(DEVICE),
            lambda: torch.empty(4, device=DEVICE).copy_(torch.ones(4)),
            lambda: devices.moment(DEVICE).wait(),
        ]
        for look in looks:
            assert len(device.waited(look)) == 1
        assert device.waited(lambda: torch.ones(3).to(DEVICE, non_blocking=True)) == []
        with pytest.raises(RuntimeError, match="tolist"):
            x.tolist()


def test_a_partial_whose_types_a_chains_end_cut_off_is_dropped_as_a_whole():
    engine, chain = make_engine(), Neighbours(cut_off={1})
    engine.compute(TYPES, 0, chain)
    run, single = Partial(lane=0, first=0, last=1), Partial(lane=1, first=2, last=2)
    assert engine.store.held() == (run, single), "the host has counted them"
    table = table_of(engine)
    engine.reduce(None, table, [0], 0)
    with pytest.raises(GroupEnded, match="the chain ended before its types were computed"):
        engine.ballot(None, table, 0, SLOT, "")
    assert engine.store.held() == (run, single)
    engine.judge_held()
    assert engine.store.held() == (single,)
    assert set(engine.type_results) == {2}

    engine.compute((0, 1), 0, Neighbours())  # as a patch
    assert engine.store.held() == (run, single)
    whole, twin = table_of(engine), make_engine()
    twin.compute(TYPES, 0, None)
    ballots = []
    for each in (engine, twin):
        each.reduce(None, whole, [0], 0)
        ballots.append(each.ballot(None, whole, 0, SLOT, ""))
    assert ballots[0] == ballots[1]


class Standing:
    """A group of a chain."""

    problem = ""

    def __init__(self):
        self._ended = None

    def broke(self, error):
        del error
        return ""

    def check(self):
        if self._ended is not None:
            raise GroupEnded(self._ended)

    def shutdown(self, why):
        self._ended = why


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("split_with_sizes expects non-negative sizes"),
        UnreliableDeviceError("three results"),
        workload.WorkloadError("no such token"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_over_what_an_ended_chain_has_left_is_the_end_of_the_chain(
    monkeypatch, error, with_mesh
):
    engine = make_engine()
    chain = ChainGroups("chain", Standing(), Standing() if with_mesh else None)

    def stumble(*_, **__):
        raise error

    monkeypatch.setattr(engine.interpreter, "run", stumble)
    with pytest.raises(type(error)):
        engine.compute(TYPES, 0, chain)
    chain.shutdown("a cell is gone")
    with pytest.raises(GroupEnded, match="a cell is gone"):
        engine.compute(TYPES, 0, chain)
