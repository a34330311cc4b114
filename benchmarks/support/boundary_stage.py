"""Trains the middle stage of three in this process, and computes its steps again from stores.

What its neighbours send is drawn once. In training it comes from a played chain, in a replay from
their logs, which lie in the store of another pod. Stores run in processes of their own, as
supervisors do. Engine, segments and replay are the product's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
from support.lone_rank import JOB, LIFE, QUORUM, chain_plan
from support.segment_stage import ADDRESS, LINEAGE, PODS, Stores

from mainstay_core.base.ids import Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.rank.events import LoadFailed
from mainstay_core.rank.replays.authors import Authorship
from mainstay_core.rank.replays.boundaries import BoundaryReplay, BoundaryStep, UnitLoad
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.segments.frames import SOCKET_NAME
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan, Rendezvous
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind, boundary_key
from mainstay_core.wire.votes import Commit, CommitRecord
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.model import workload as workloads
from mainstay_train.snapshots.boundary_replayer import BoundaryReplayer
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.sent_log import SentLogs, flow_digest
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import StageChecks, ToldUnits
from mainstay_train.snapshots.writer import Place, SegmentWriter
from mainstay_train.state.segment_reader import STALL_S
from mainstay_train.state.segments import SegmentClient

STAGE, NUM_STAGES = 1, 3
MICRO_BATCHES = 1
RATE = 1e-4
SENDERS = {SegmentKind.ACTIVATION: 0, SegmentKind.INPUT_GRADIENT: 2}
"""Position of the neighbour that sends each kind."""


def make_plan(stores: Stores) -> Plan:
    """Return a plan of three stages: the middle one in the first pod, the others in the second."""
    slots = (
        Slot(pod=PODS[1], index=0),
        Slot(pod=PODS[0], index=0),
        Slot(pod=PODS[1], index=1),
    )
    hosts = tuple(
        Rendezvous(pod=pod, gather="", snapshots=address, domain=pod)
        for pod, address in zip(PODS, stores.addresses, strict=True)
    )
    return chain_plan(slots, hosts)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A tensor as the content of a segment."""

    key: SegmentKey
    tensor: torch.Tensor
    name: str = "drawn"

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def write(self, memory: memoryview) -> None:
        flat = self.tensor.reshape(-1).view(torch.uint8)
        torch.frombuffer(memory, dtype=torch.uint8).copy_(flat)

    def digest(self, memory: memoryview) -> str:
        return flow_digest(self.key, torch.frombuffer(memory, dtype=self.tensor.dtype))


class _PlayedChain:
    """A chain whose neighbours have sent everything already and take everything at once."""

    tells_sent = True

    def __init__(self, tensors: dict[tuple[int, int], torch.Tensor]) -> None:
        self.pipeline = self
        self._tensors = tensors
        """By neighbour and micro-batch."""

    def send(self, message: Any) -> Any:
        del message
        return SimpleNamespace(is_over=True)

    def receive(self, message: Any) -> Any:
        source = self._tensors[message.peer, message.tag // 2]
        message.tensor.copy_(source)
        return SimpleNamespace(is_over=True)

    def send_and_receive(self, sent: Any, received: Any) -> Any:
        return self.send(sent), self.receive(received)

    def finish(self, pending: Any) -> None:
        """Everything is over."""

    def mark(self, moment: Any) -> None:
        """Everything counts."""

    def judge(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class Times:
    """Seconds of steps, of this thread's clock on the wall and of the process's CPU."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def note(self, begun: tuple[float, float]) -> None:
        """Note what has passed since :func:`now`."""
        wall_s, cpu_s = now()
        self.wall_s.append(wall_s - begun[0])
        self.cpu_s.append(cpu_s - begun[1])


def now() -> tuple[float, float]:
    """Return seconds of the wall and of the process's CPU."""
    return time.perf_counter(), time.process_time()


class BoundaryStage:
    """The middle stage, its neighbours' logs, and copies of its units at every version.

    Args:
        entrypoint: of the workload.
        config: of the workload.
        stores: of two pods.
        num_steps: to train and to replay.
        biases: what is added to the score of each of a layer's experts where a router chooses; none
            where it begins without any.
        has_all_states: whether full states are copied at every version, too, and not at the first
            and the last one alone.
    """

    def __init__(
        self,
        entrypoint: str,
        config: dict[str, Any],
        stores: Stores,
        num_steps: int,
        *,
        biases: Sequence[float] = (),
        has_all_states: bool = False,
    ) -> None:
        loaded = workloads.load(entrypoint, config)
        shape = JobShape(
            lanes=1,
            shards_per_lane=1,
            replicas=1,
            min_replicas=1,
            stages=NUM_STAGES,
            steps=1 << 30,
            seed=0,
            micro_batches=MICRO_BATCHES,
        )
        job = JobConfig(
            job=JOB, name="bench", shape=shape, entrypoint="", workload=config, device="cpu"
        )
        training = BlockTraining(
            workload=loaded, config=job, device="cpu", loader=Loader(loaded.dataset)
        )
        self.engine = training.build_engine(STAGE, NUM_STAGES, 0, lambda _: None)
        self.engine.state.initialize(0)
        self._bias_routers(biases)
        self.job_units = training.job_units()
        self._has_all_states = has_all_states
        self.units = UnitBytes(self.engine.state, self.engine.reducer.reduced)
        self.num_steps = num_steps
        self.plan = make_plan(stores)
        clients = [
            SegmentClient(str(stores.path.parent.parent / pod / SOCKET_NAME), 0, LIFE, ADDRESS)
            for pod in PODS
        ]
        self._client = clients[0]
        self._writers = [SegmentWriter(JOB, client, lambda *_: None) for client in clients]
        self._sent = SentLogs(clients[0], self._writers[0])
        self._holders = [
            (Holder(pod=pod, address=address),)
            for pod, address in zip(PODS, stores.addresses, strict=True)
        ]
        self._drawn: dict[tuple[int, SegmentKind, int], torch.Tensor] = {}
        self._draw()
        self.records: list[CommitRecord] = []
        self.own = Times()
        """Of the steps as they were trained."""
        self.counted = torch.zeros(0, dtype=torch.int64)
        """Tokens of each expert, over all steps."""
        self._train()

    def _bias_routers(self, biases: Sequence[float]) -> None:
        """Set the biases of all routers, which only commits change."""
        if not biases:
            return
        for block in self.engine.state.blocks:
            views = block.layout.views(block.masters)
            for name in block.committed:
                views[name].copy_(torch.tensor(biases))
        self.engine.state.refresh()

    def place(self, position: int = STAGE) -> Place:
        """Return the place of a position's member."""
        own = Authorship(units=(), holders=())
        return Place(self.plan, position, LINEAGE, own, self.units)

    def _draw(self) -> None:
        """Draw what the neighbours send, and write their logs."""
        generator = torch.Generator().manual_seed(1)
        for step in range(self.num_steps):
            for kind, sender in SENDERS.items():
                for number in range(MICRO_BATCHES):
                    tensor = self.engine.make_activation()
                    drawn = torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(drawn * (1.0 if kind is SegmentKind.ACTIVATION else 1e-3))
                    self._drawn[step, kind, number] = tensor
                    key = boundary_key(LINEAGE, sender, kind, step, 0, number)
                    self._writers[1].write(self.place(sender), key, _Drawn(key, tensor), ())

    def _train(self) -> None:
        engine = self.engine
        masters = engine.state.masters_digest().whole.hex()
        for step in range(self.num_steps + 1):
            self._copy_units(step)
            self.records.append(self._record(step, masters, "0" * 32))
            if step == self.num_steps:
                return
            begun = now()
            engine.compute((0,), step, cast(Any, self._chain(step)))
            counted = engine.type_results[0].statistics
            engine.reduce(None, [Supply(partial=p, index=0) for p in engine.store.held()], [0], 0)
            self.own.note(begun)
            if counted is not None:
                self.counted = counted if not len(self.counted) else self.counted + counted
            self.records[-1] = self._record(step, masters, engine.gradient_digest())
            engine.drop_held()
            masters = engine.apply(self.records[-1].commit, RATE)

    def _chain(self, step: int) -> _PlayedChain:
        tensors = {
            (sender, number): self._drawn[step, kind, number]
            for kind, sender in SENDERS.items()
            for number in range(MICRO_BATCHES)
        }
        return _PlayedChain(tensors)

    def _copy_units(self, version: int) -> None:
        is_full = self._has_all_states or version in (0, self.num_steps)
        full = (SegmentKind.STATE,) if is_full else ()
        for kind in (*full, SegmentKind.COMPUTE):
            for name in self.units.names:
                place = self.place()
                self._writers[0].write_unit(place, place.key(name, kind, version))

    def _record(self, step: int, masters: str, gradient: str) -> CommitRecord:
        # Statistics change the routers' bias; here it stays as it was drawn.
        counts = (0,) * max((s.stop for s in self.engine.statistics), default=0)
        commit = Commit(
            step=step, norm=1, scale=1e-3, tokens=1, loss=1, data="0" * 32, statistics=counts
        )
        return CommitRecord(
            lineage=LINEAGE,
            commit=commit,
            certified_in=str(QUORUM),
            chain="",
            gradients=("", gradient, ""),
            states=("", masters, ""),
        )

    def replay(self, active_from: Mapping[str, int]) -> tuple[Times, float]:
        """Compute all steps again, with some units frozen at first.

        Args:
            active_from: version at which each of them has its full state; the first one for what is
                not named.

        Returns:
            The times of its steps, and of all of it, in seconds.

        Raises:
            RuntimeError: other bits come out.
        """
        engine, times = self.engine, Times()
        engine.state.initialize(1)
        copies = GoodCopies(self._client, PODS[0], lambda: "")
        replayer = BoundaryReplayer(engine, self.units, copies, lambda _: RATE)
        compute_again = engine.compute_again

        def timed(*arguments: Any) -> None:
            begun = now()
            compute_again(*arguments)
            times.note(begun)

        watched = cast(Any, _Watched(engine, timed))
        replayer._engine = watched
        place = self.place()
        found = ToldUnits(self._client.digests, place.position, (), STALL_S, lambda: "")
        told = StageChecks(engine, self.units, found)
        began_s = time.perf_counter()
        outcome = replayer.run(self._replay_of(active_from), self._sent, place, told)
        took_s = time.perf_counter() - began_s
        if isinstance(outcome, LoadFailed):
            raise RuntimeError(outcome.why)
        return times, took_s

    def _replay_of(self, active_from: Mapping[str, int]) -> BoundaryReplay:
        last = max(active_from.values(), default=0)
        steps = tuple(
            BoundaryStep(
                record=self.records[step],
                loads=self._loads(step, active_from),
                frozen=(frozen := self._frozen(step, active_from)),
                skipped=frozen,
                inputs=tuple(
                    (boundary_key(LINEAGE, sender, kind, step, 0, number), self._holders[1])
                    for kind, sender in SENDERS.items()
                    for number in range(MICRO_BATCHES)
                ),
            )
            for step in range(self.num_steps)
        )
        return BoundaryReplay(
            position=STAGE,
            version=self.num_steps,
            stretch=Stretch(first=STAGE, last=STAGE),
            window=Window(first=0, length=last + 1),
            steps=steps,
            loads=self._loads(self.num_steps, active_from),
            next=self.records[self.num_steps],
        )

    def _frozen(self, step: int, active_from: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sorted(self.units.numbers[n] for n, at in active_from.items() if at > step))

    def _loads(self, version: int, active_from: Mapping[str, int]) -> tuple[UnitLoad, ...]:
        place, loads = self.place(), []
        for name in self.units.names:
            full_at = active_from.get(name, 0)
            if version > full_at:
                continue
            kind = SegmentKind.STATE if version == full_at else SegmentKind.COMPUTE
            key = place.key(name, kind, version)
            loads.append(UnitLoad(name=name, key=key, holders=self._holders[0]))
        return tuple(loads)


class _Watched:
    """An engine whose computations are timed."""

    def __init__(self, engine: Any, compute_again: Any) -> None:
        self._engine, self.compute_again = engine, compute_again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def units_of_two_thirds(
    names: Sequence[str], counted: Sequence[int], *, tokens: int, dim: int, hidden: int, rest: int
) -> tuple[list[str], float]:
    """Return experts in which about two thirds of a stage's multiply-adds are, and their share.

    Args:
        names: of the units of experts, in the order of their counts.
        counted: tokens of each expert.
        tokens: that went through the stage.
        dim: width of the model.
        hidden: inner width of an expert.
        rest: multiply-adds of a token outside of experts.
    """
    of_expert = [3 * dim * hidden * count for count in counted]
    total = sum(of_expert) + rest * tokens
    chosen: list[str] = []
    taken = 0
    for name, size in zip(names, of_expert, strict=True):
        if (taken + size) / total <= 2 / 3:
            chosen.append(name)
            taken += size
    return chosen, taken / total
