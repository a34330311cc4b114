"""The planners together: a stage loses all its cells, and a replay gives exactly its state.

States are played by integers. A unit's next state mixes the one before with the gradients of its
chunks, so a wrong version, a skipped step or a wrong share would show.
"""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.job.reduction_sizes import CHUNK
from mainstay_core.snapshots.copies import CopyDemand, CopyPlan, StorePod, plan_copies
from mainstay_core.snapshots.duties import Author, ChunkShare, log_shares
from mainstay_core.snapshots.gradient_replay import (
    GradientReplay,
    chunks_of,
    plan_gradient_replay,
)
from mainstay_core.snapshots.inventory import HeldLog, HeldUnit, Store
from mainstay_core.snapshots.memory import max_log_steps, window_bytes
from mainstay_core.snapshots.orderings import Ordering, order_units
from mainstay_core.snapshots.prices import StateTypes, price_units
from mainstay_core.snapshots.retention import (
    Coverage,
    Retention,
    after_commit,
    begin_window,
)
from mainstay_core.snapshots.schedule import PositionState, WindowPlan, plan_window
from mainstay_core.snapshots.units import (
    Block,
    Parameter,
    ParameterSlice,
    Position,
    Unit,
    UnitKind,
    UnitSpec,
    tile_position,
)

ADAM = StateTypes(compute_bytes=2, master_bytes=4, optimizer_bytes=(4, 4))
LAG = 1
"""Copies may be one step late."""


def build_units(position: Position, rng: random.Random) -> tuple[Unit, ...]:
    """Blocks of three experts in one stacked parameter, and the rest."""
    blocks = []
    for number in range(rng.randint(1, 2)):
        rows = 32 * rng.randint(1, 3000)
        experts = Parameter(name="experts", offset=0, num_elements=3 * rows)
        rest = Parameter(name="rest", offset=3 * rows, num_elements=32 * rng.randint(1, 3000))
        declared = [
            UnitSpec(
                name=f"expert.{e}",
                kind=UnitKind.EXPERT,
                slices=(ParameterSlice(parameter="experts", start=e * rows, stop=(e + 1) * rows),),
            )
            for e in range(3)
        ] + [UnitSpec(name="rest", kind=UnitKind.REST, slices=(ParameterSlice(parameter="rest"),))]
        block = Block(
            name=f"layers.{position.stage}{number}",
            parameters=(experts, rest),
            num_elements=rest.offset + rest.num_elements,
        )
        blocks.append((block, declared))
    return tile_position(position, blocks)


class Pod:
    """A pod: its store, and the author of one stage if it is no spare."""

    def __init__(self, name: str, domain: str, stage: int | None) -> None:
        self.store = StorePod(
            pod=PodUid(name), domain=domain, stages=() if stage is None else (stage,)
        )
        self.author = Author(slot=Slot(pod=PodUid(name), index=0), incarnation=Incarnation("life"))
        self.coverage = Coverage()
        self.states: dict[tuple[str, int], int] = {}
        self.logs: dict[tuple[int, ChunkShare, int], dict[int, int]] = {}
        """(stage, share, step) to gradients by chunk"""


class Job:
    """Two stages with some cells each, and spares, that train and copy."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        cells = rng.randint(1, 3)
        self.pods = {
            f"p{stage}{cell}": Pod(f"p{stage}{cell}", f"rack{rng.randrange(3)}", stage)
            for stage in range(2)
            for cell in range(cells)
        }
        self.pods |= {f"s{n}": Pod(f"s{n}", f"rack{n}", None) for n in range(2)}
        self.units = {stage: build_units(Position(stage=stage), rng) for stage in range(2)}
        self.chunks = {stage: chunks_of(units) for stage, units in self.units.items()}
        self.state = {
            u.name: sum(u.name.encode()) % 997 for units in self.units.values() for u in units
        }
        self.version = 0
        self.retention = Retention()
        self.plan: WindowPlan | None = None
        self.copies: CopyPlan | None = None
        self.late: list[tuple[str, int]] = []

    def authors(self, stage: int) -> list[Author]:
        return [pod.author for pod in self.pods.values() if stage in pod.store.stages]

    def step(self) -> None:
        if self.retention.open is None:
            self.begin()
        late, self.late = self.late, []
        for name, number in late:
            self.place(name, number)
        self.copy_instalments()
        gradients = self.log_gradients()
        votes = {pod.author: pod.coverage.status for pod in self.pods.values() if pod.store.stages}
        self.retention, _ = after_commit(self.retention, self.version, votes)
        for stage, units in self.units.items():
            for unit in units:
                chunks = self.chunks[stage][unit.name]
                self.state[unit.name] = advance(
                    self.state[unit.name], {c: gradients[stage][c] for c in chunks}
                )
        self.version += 1
        for pod in self.pods.values():
            self.drop(pod)

    def begin(self) -> None:
        positions = []
        for stage, units in self.units.items():
            order = price_units(order_units(units, Ordering.POPULARITY), ADAM, with_compute=True)
            positions.append(
                PositionState(
                    position=Position(stage=stage), order=order, authors=tuple(self.authors(stage))
                )
            )
        budget = self.rng.choice((10**6, 3 * 10**6, 10**7))
        self.plan = plan_window(self.version, positions, budget)
        demands = [
            CopyDemand(
                position=one.position,
                pod=one.author.slot.pod,
                size_bytes=window_bytes(one.instalments),
            )
            for one in self.plan.assignments
        ]
        stores = [pod.store for pod in self.pods.values()]
        self.copies = plan_copies(stores, demands, peers=2, domains=2, previous=self.copies)
        self.retention = begin_window(
            self.retention, self.plan.window, [one.author for one in self.plan.assignments]
        )
        for one in self.plan.assignments:
            pod = self.pods[one.author.slot.pod]
            pod.coverage = pod.coverage.begin(
                self.plan.window, one.numbers, pod.store.pod, self.holders(pod.store.pod)[1:]
            )
        # What the copies of each instalment say, by author, as of the version of that instalment.
        self.taken: dict[tuple[str, int], dict[str, int]] = {}

    def holders(self, name: str) -> tuple[PodUid, ...]:
        assert self.copies is not None
        (copies,) = [c for c in self.copies.copies if c.pod == name]
        return copies.holders

    def copy_instalments(self) -> None:
        assert self.plan is not None
        if self.retention.open is None:
            return
        number = self.plan.window.number_of(self.version)
        for one in self.plan.assignments:
            if number is None or number not in one.numbers:
                continue
            name = one.author.slot.pod
            full = one.instalments[number].full
            self.taken[name, number] = {unit: self.state[unit] for unit in full}
            if self.rng.random() < 0.8:
                self.place(name, number)
            else:
                self.late.append((name, number))

    def place(self, name: str, number: int) -> None:
        assert self.plan is not None
        window, pod = self.plan.window, self.pods[name]
        for holder in self.holders(name):
            for unit, state in self.taken[name, number].items():
                self.pods[holder].states[unit, window.version_of(number)] = state
            pod.coverage = pod.coverage.placed(window.first, number, holder)

    def log_gradients(self) -> dict[int, dict[int, int]]:
        """A step's gradients by stage and chunk; each author logs its share at its holders."""
        gradients = {}
        for stage, chunks in self.chunks.items():
            num_chunks = 1 + max(chunk for of_unit in chunks.values() for chunk in of_unit)
            gradients[stage] = {chunk: self.rng.randrange(997) for chunk in range(num_chunks)}
            for author, share in log_shares(self.authors(stage)).items():
                mine = {c: g for c, g in gradients[stage].items() if c % share.of == share.index}
                for holder in self.holders(author.slot.pod):
                    self.pods[holder].logs[stage, share, self.version] = mine
        return gradients

    def drop(self, pod: Pod) -> None:
        windows, first = self.retention.windows, self.retention.first_log
        pod.states = {
            (unit, version): state
            for (unit, version), state in pod.states.items()
            if any(window.number_of(version) is not None for window in windows)
        }
        pod.logs = {
            key: log for key, log in pod.logs.items() if first is not None and key[2] >= first
        }

    def store_of(self, pod: Pod, stage: int, *, living: bool) -> Store:
        position = Position(stage=stage)
        return Store(
            pod=pod.store.pod,
            domain=pod.store.failure_domain,
            living=living,
            units=tuple(
                HeldUnit(position=position, unit=unit, full=(version,))
                for unit, version in sorted(pod.states)
                if unit in self.chunks[stage]
            ),
            logs=tuple(
                HeldLog(position=position, share=share, first_step=step, stop_step=step + 1)
                for at, share, step in sorted(pod.logs)
                if at == stage
            ),
        )


def advance(state: int, gradients: dict[int, int]) -> int:
    """The optimizer: chunk by chunk, in an order that counts."""
    for chunk in sorted(gradients):
        state = (state * 31 + gradients[chunk] * (chunk + 1)) % 1_000_003
    return state


def play(job: Job, plan: GradientReplay, stage: int) -> dict[str, int]:
    """Carry a replay out with what its sources hold."""
    states = {}
    for one in plan.units:
        state = job.pods[one.source].states[one.unit, one.from_version]
        for step in range(one.from_version, plan.version):
            gradients: dict[int, int] = {}
            for fetch in one.logs:
                if fetch.first_step <= step < fetch.stop_step:
                    gradients |= job.pods[fetch.source].logs[stage, fetch.share, step]
            wanted = job.chunks[stage][one.unit]
            state = advance(state, {chunk: gradients[chunk] for chunk in wanted})
        states[one.unit] = state
    return states


@pytest.mark.parametrize("seed", range(8))
def test_a_stage_that_lost_all_its_cells_gets_its_exact_state_back(seed: int) -> None:
    replays = 0
    for case in range(25):
        rng = random.Random(seed * 1000 + case)
        job = Job(rng)
        lengths = []
        for _ in range(rng.randint(1, 30)):
            job.step()
            assert job.plan is not None
            lengths.append(job.plan.window.length)
        if job.retention.complete is None:
            continue
        replays += 1
        stage = rng.randrange(2)
        dead = {name for name, pod in job.pods.items() if stage in pod.store.stages}
        stores = [
            job.store_of(pod, stage, living=name not in dead) for name, pod in job.pods.items()
        ]
        joiners = [job.pods[name].author for name in ("s0", "s1")[: rng.randint(1, 2)]]

        plan = plan_gradient_replay(job.units[stage], stores, job.version, joiners)

        assert isinstance(plan, GradientReplay), plan
        assert dead.isdisjoint({one.source for one in plan.units})
        assert play(job, plan, stage) == {u.name: job.state[u.name] for u in job.units[stage]}
        assert plan.num_steps <= max_log_steps(max(lengths), LAG) - 1
    assert replays > 10


def test_chunks_of_the_played_units_are_those_of_the_grid() -> None:
    units = build_units(Position(stage=0), random.Random(1))

    ends: dict[int, int] = {}
    for unit in units:
        ends[unit.block_index] = max(ends.get(unit.block_index, 0), unit.spans[-1].stop)
    total = sum(-(-end // CHUNK) for end in ends.values())
    assert set().union(*chunks_of(units).values()) == set(range(total))
