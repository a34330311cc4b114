"""Trains one stage in this process, and keeps its segments in stores of two pods.

The stores run in processes of their own, as supervisors do, and talk by real sockets. The trainer's
side is the product's: engine, keeper, client. Steps follow each other as a rank's machine orders
them, with one vote to each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.lone_rank import JOB, LIFE, QUORUM, lone_plan, lone_shape

from mainstay_agent.snapshots.store import SegmentStore
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.job.config import JobConfig, SnapshotConfig
from mainstay_core.rank.events import LoadFailed, PlacedUnit, Snapshot, StateLoaded
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.rank.shell import run_blocking
from mainstay_core.rank.steps.step_plan import plan_step
from mainstay_core.segments.frames import SOCKET_NAME
from mainstay_core.segments.spans import room_of
from mainstay_core.snapshots.windows import Window, plan_instalments
from mainstay_core.wire.plan import Plan, Rendezvous
from mainstay_core.wire.segments import SegmentKind
from mainstay_core.wire.votes import Commit, CommitRecord, seal_record
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.model import workload as workloads
from mainstay_train.snapshots.keeper import SegmentKeeper
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.segments import SegmentClient

ADDRESS = "127.0.0.1"
PODS = (PodUid("pod-0"), PodUid("pod-1"))
SLOT = Slot(pod=PODS[0], index=0)
LINEAGE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The stores of two pods."""

    path: Path
    """Socket of the first one, for the trainer."""
    addresses: tuple[str, ...]
    processes: tuple[int, ...]

    def cpu_s(self) -> float:
        """Return the seconds of CPU that both have used."""
        ticks = os.sysconf("SC_CLK_TCK")
        total = 0
        for pid in self.processes:
            told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(told[11]) + int(told[12])
        return total / ticks


@contextlib.contextmanager
def running_stores(memory_bytes: int) -> Iterator[Stores]:
    """Run the stores of two pods until the block ends."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        processes, addresses = [], []
        for pod in PODS:
            (Path(name) / pod).mkdir()
            ours, theirs = context.Pipe()
            arguments = (theirs, pod, Path(name) / pod, memory_bytes)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            addresses.append(ours.recv())
            processes.append(process)
        try:
            path = Path(name) / PODS[0] / SOCKET_NAME
            pids = tuple(process.pid or 0 for process in processes)
            yield Stores(path=path, addresses=tuple(addresses), processes=pids)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _serve(pipe: Connection, pod: PodUid, directory: Path, memory_bytes: int) -> None:
    store = SegmentStore(
        job=JOB, pod=pod, address=ADDRESS, path=directory / SOCKET_NAME, memory_bytes=memory_bytes
    )
    pipe.send(store.address)
    store.serve()


def make_plan(addresses: tuple[str, ...]) -> Plan:
    """Return a plan of one rank, and a pod beside its own that keeps copies."""
    hosts = (
        Rendezvous(pod=pod, gather="", snapshots=address, domain=pod)
        for pod, address in zip(PODS, addresses, strict=True)
    )
    return lone_plan(SLOT, tuple(hosts))


class SegmentStage:
    """A stage that trains, and its segments.

    Args:
        entrypoint: of the workload.
        config: of the workload.
        stores: of two pods.
    """

    def __init__(self, entrypoint: str, config: dict[str, Any], stores: Stores) -> None:
        loaded = workloads.load(entrypoint, config)
        job = JobConfig(
            job=JOB, name="bench", shape=lone_shape(), entrypoint="", workload=config, device="cpu"
        )
        loader = Loader(loaded.dataset)
        self.training = BlockTraining(workload=loaded, config=job, device="cpu", loader=loader)
        self.engine = self.training.build_engine(0, 1, 0, lambda _: None)
        self.engine.state.initialize(0)
        self.plan = make_plan(stores.addresses)
        self.client = SegmentClient(str(stores.path), SLOT.index, LIFE, ADDRESS)
        self.keeper = SegmentKeeper(
            job=JOB,
            slot=SLOT,
            config=SnapshotConfig(memory_bytes=0, num_instalments=0, peers=1, domains=2),
            client=self.client,
            engine=lambda: self.engine,
            learning_rate=lambda _: 1e-4,
            hook=lambda: lambda _: None,
        )
        self.keeper.start({})
        self.version, self.masters = 0, self.engine.state.masters_digest().whole.hex()
        self.table = plan_step(self.plan, 1).table[0]
        self.window: Window | None = None
        self.num_complete = 0
        """Complete windows."""
        self.lags: list[int] = []
        """Steps from the last instalment of each of them to the commit that completed it."""
        self.look: Callable[[], None] = lambda: None
        """Called at each commit before anything goes: when a store is at its fullest."""

    def units(self) -> UnitBytes:
        """Return the units of the stage's state."""
        return UnitBytes(self.engine.state, self.engine.reducer.reduced)

    def step(self, length: int = 0) -> None:
        """Train one step.

        Args:
            length: of a window that begins now; 0: nothing is kept.
        """
        if length and self.window is None:
            self.window = Window(first=self.version, length=length)
        if length and self.window and self.window.number_of(self.version) is not None:
            self.keeper.snapshot(self.plan, 0, LINEAGE, self._due(self.window))
        self.engine.compute((0,), self.version, None)
        self.engine.reduce(None, self.table, [0], 0)
        ballot = self.engine.ballot(None, self.table, 0, SLOT, self.masters)
        commit = Commit(step=self.version, norm=1, scale=1e-3, tokens=1, loss=1, data="0" * 32)
        if length:
            self._keep(commit, ballot.gradient)
        self.keeper.wait_copied()
        self.masters = self.engine.apply(commit, 1e-4)
        self.engine.drop_held()
        self.version += 1

    def _due(self, window: Window) -> Snapshot:
        """Return the instalment of this version, the last units first."""
        order = tuple(reversed(self.units().prices))
        places = {price.name: place for place, price in enumerate(order)}
        number = window.number_of(self.version)
        assert number is not None
        due = plan_instalments(order, window.length)[number].full
        return Snapshot(self.version, window, tuple(PlacedUnit(name, places[name]) for name in due))

    def _keep(self, commit: Commit, gradient: str) -> None:
        """Log the gradient, and look whether the window is complete."""
        keeper = self.keeper
        log = keeper.log(keeper.begin_wait(), self.plan, 0, LINEAGE, self.version, (0,))
        if not run_blocking(log):
            raise RuntimeError(f"the gradient of step {self.version} is not kept")
        status = keeper.status(self.version, logged=True)
        window = self.window
        assert window is not None
        self.look()
        if self.version >= window.last and status.copied > window.last:
            keeper.keep_from(LINEAGE, window.first)
            self.window, self.num_complete = None, self.num_complete + 1
            self.lags.append(self.version - window.last)
        keeper.record(
            seal_record(
                CommitRecord(
                    lineage=LINEAGE,
                    commit=commit,
                    certified_in=str(QUORUM),
                    chain="",
                    gradients=(gradient,),
                    states=(self.masters,),
                )
            )
        )

    async def replay(self, replay: Replay) -> StateLoaded | LoadFailed:
        """Make the stage's state anew of what the stores have."""
        return await self.keeper.replay(self.keeper.begin_wait(), self.plan, 0, replay, None)

    def stop_keeping(self) -> None:
        """Give up the window at hand and drop all segments."""
        self.keeper.wait_copied()
        self.window = None
        self.keeper.keep_from(LINEAGE, self.version)

    def held_bytes(self) -> int:
        """Return the bytes of all segments in the store of the trainer's pod, in whole pages."""
        units, total = self.units(), 0
        for held in self.client.report(LINEAGE).units:
            logged = sum(run.last - run.first + 1 for run in held.gradients)
            total += len(held.states) * room_of(units.size_bytes(held.unit, SegmentKind.STATE))
            total += logged * room_of(units.size_bytes(held.unit, SegmentKind.GRADIENT))
        return total
