"""Decides which states pods' stores of segments can make anew, and how (protocol section 6).

A position that no living member holds is not lost while stores of segments cover it: each unit's
state at some version, and its reduced gradients of all steps since. From these a member computes
the state by the optimizer alone, with the scale that each step's commit names. Nobody else computes
anything (design section 5, row 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from mainstay_core.base.frames import MAX_BODY_BYTES
from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.told_records import choose_records
from mainstay_core.segments.report_sizes import MAX_TOLD_BYTES
from mainstay_core.snapshots.units import agreed_number
from mainstay_core.wire.plan import OtherStore, Plan
from mainstay_core.wire.reinitialisation import History
from mainstay_core.wire.segments import (
    Holder,
    Run,
    SegmentKey,
    SegmentKind,
    StoreReport,
    UnitHeld,
)
from mainstay_core.wire.votes import CommitRecord, SettleReport

ReplayerT = TypeVar("ReplayerT")
_Copies = list[tuple[Holder, UnitHeld]]
"""Of one unit, what each pod keeps."""
NO_DOMAINS: Mapping[PodUid, str] = MappingProxyType({})
"""Of no pod its failure domain is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReplay:
    """The segments from which one unit comes to the settled version."""

    unit: int
    name: str
    state: SegmentKey
    """The state that it starts from."""
    state_holders: tuple[Holder, ...]
    gradients: tuple[tuple[SegmentKey, tuple[Holder, ...]], ...]
    """The gradient of each step since, ascending, and who keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The segments and commits from which a member makes its position's state anew."""

    position: int
    version: int
    """At which it is then."""
    units: tuple[UnitReplay, ...]
    """In the position's canonical order."""
    records: tuple[CommitRecord, ...]
    """The commits of all steps that are applied again, ascending."""
    last: CommitRecord | None = None
    """The commit of the step before ``version``, also if no unit applies it again; None if no store
    has it."""
    next: CommitRecord | None = None
    """The commit of the step at ``version``, whose votes told the digest that the masters must
    have; None if no store has it."""
    history: History = ()
    """Forks that the state contains: learning rates of its steps follow from them."""

    @property
    def first_step(self) -> int:
        """Return the first step that some unit applies again; the version where none does."""
        return min((unit.state.version for unit in self.units), default=self.version)

    @property
    def known(self) -> tuple[CommitRecord, ...]:
        """Return all commits that it names, by step."""
        ends = (end for end in (self.last, self.next) if end is not None)
        return tuple({r.commit.step: r for r in (*self.records, *ends)}.values())


class UnfinishedReplay(Generic[ReplayerT]):
    """A replay by gradients that the end of its quorum left unfinished, with what it has made.

    It is good for the very next quorum of the same lineage alone. In one between, of which this
    rank was no member, the others may have gone back to a state from before a corruption.
    """

    def __init__(self) -> None:
        self._left: tuple[Plan, ReplayerT] | None = None

    def keep(self, plan: Plan, replayer: ReplayerT) -> None:
        """Note what a replay left when the quorum of ``plan`` ended."""
        self._left = plan, replayer

    def forget(self) -> None:
        """Forget it: something else writes the state, or counts."""
        self._left = None

    def take(self, plan: Plan) -> ReplayerT | None:
        """Return what the replay of a plan may go on with, and forget it; None if there is none."""
        left, self._left = self._left, None
        if left is None:
            return None
        before, replayer = left
        follows = plan.quorum.id == before.quorum.id + 1 and plan.lineage == before.lineage
        return replayer if follows else None


def can_go_on(replay: Replay, made: Mapping[int, int]) -> bool:
    """Return whether a replay can go on from what an earlier one of its position left in memory.

    A state is a function of position and version, so it does not matter which quorum's replay made
    it. Each step since then has to be in this one.

    Args:
        replay: of the same lineage and position.
        made: by unit the version at which it is in memory; units that were not read are not there.
    """
    return all(
        unit.state.version <= made[unit.unit] <= replay.version
        for unit in replay.units
        if unit.unit in made
    )


def needs_stores(plan: Plan, reports: Sequence[SettleReport]) -> bool:
    """Return whether some position has no member that stayed with a valid state.

    Args:
        plan: the plan being adopted.
        reports: one per member, in any order.
    """
    stayed = {
        r.index
        for r in reports
        if r.valid and r.lineage == plan.lineage and r.settled >= plan.members[r.index].since
    }
    return any(not stayed.intersection(m.index for m in members) for members in plan.positions)


def speaks_for_store(plan: Plan, index: int) -> bool:
    """Return whether a member is the one of its pod that tells what the pod's store holds."""
    pod = plan.members[index].slot.pod
    return index == min(m.index for m in plan.members if m.slot.pod == pod)


def others_to_ask(plan: Plan, index: int) -> tuple[OtherStore, ...]:
    """Return the stores of pods without a member that are a member's to ask.

    Each is asked by one member, and all members ask about as many.
    """
    return plan.other_stores[index :: len(plan.members)]


def bytes_to_tell(plan: Plan, index: int) -> int:
    """Return how long a member's reports of stores may be, so that one frame carries all of them.

    Each store has an equal share, and each member a little one for what it says beside.
    """
    num_pods = len({member.slot.pod for member in plan.members})
    share = MAX_TOLD_BYTES // (num_pods + len(plan.other_stores))
    beside = (MAX_BODY_BYTES - MAX_TOLD_BYTES) // len(plan.members)
    num_stores = speaks_for_store(plan, index) + len(others_to_ask(plan, index))
    return share * num_stores + beside


class StoreContents:
    """The contents of all stores of a quorum's pods, taken together.

    Args:
        reports: of the stores; those of another lineage hold nothing that counts.
        lineage: of the plan.
        domains: the failure domain of each pod with a store, as far as it is known.
    """

    def __init__(
        self,
        reports: Sequence[StoreReport],
        lineage: int,
        domains: Mapping[PodUid, str] = NO_DOMAINS,
    ) -> None:
        self._lineage, self._domains = lineage, domains
        self._units: dict[int, dict[int, _Copies]] = {}
        """By position and unit, in the order of pods."""
        self.unasked = {r.pod: r.problem for r in reports if r.problem}
        """Why pods' stores could not be asked, by pod."""
        # In one order, whoever tells first: all ranks come to the same holders and records.
        told = sorted((r for r in reports if r.lineage == lineage), key=lambda r: r.pod)
        records = choose_records(told, lineage)
        self.records = records.chosen
        """By step."""
        self.certified = records.certified
        """By step the quorums (as text) that are known to have committed it."""
        self.bad_records = records.faults
        """Which records count for nothing, and why; empty if all that are told may count."""
        bad = {(bad.pod, bad.key) for report in told for bad in report.bad}
        for report in told:
            self._add(report, {key for pod, key in bad if pod == report.pod})
        self._units = {position: _of_most(units) for position, units in self._units.items()}

    def _add(self, report: StoreReport, bad: Collection[SegmentKey]) -> None:
        holder = Holder(pod=report.pod, address=report.address)
        for held in report.units:
            of_position = self._units.setdefault(held.position, {})
            of_position.setdefault(held.unit, []).append((holder, _without(held, bad)))

    @property
    def are_empty(self) -> bool:
        """Return whether no store holds anything."""
        return not self._units and not self.records

    def _is_judged(self, step: int) -> bool:
        """Return whether the votes on a step, and what they said of each position, are known."""
        record = self.records.get(step)
        return record is not None and bool(record.states)

    def _name_pods(self, holders: Iterable[Holder]) -> str:
        """Return the pods of some holders, each with its failure domain, for a sentence."""
        pods = sorted({holder.pod for holder in holders})
        return ", ".join(
            f"{pod} (failure domain {self._domains[pod]})" if pod in self._domains else pod
            for pod in pods
        )

    def _units_of(self, position: int) -> Mapping[int, _Copies] | None:
        """Return what is held of each unit of a position; None unless all units are there."""
        units = self._units.get(position)
        if not units:
            return None
        _, held = next(iter(units.values()))[0]
        return units if len(units) == held.num_units else None


class Stores(StoreContents):
    """The same, in a job that logs gradients: each position is made anew by itself."""

    def reach(self, position: int, lost: Collection[int] = ()) -> frozenset[int]:
        """Return the versions of a position that can be made anew, whatever else is lost.

        Complexity: linear in what the stores hold of the position.
        """
        del lost
        units = self._units_of(position)
        if units is None:
            return frozenset()
        reached = [self._reach_of_unit(copies) for copies in units.values()]
        return frozenset.intersection(*reached)

    def plan_replay(self, position: int, version: int, lost: Collection[int] = ()) -> Replay | None:
        """Return how to make a position's state at a version; None if it cannot be made.

        Each unit starts from its newest state, so as few steps as can be are applied again.
        """
        del lost
        units = self._units_of(position)
        if units is None:
            return None
        plans = [self._plan_unit(position, n, units[n], version) for n in sorted(units)]
        found = tuple(plan for plan in plans if plan is not None)
        if len(found) < len(plans):
            return None
        first = min(unit.state.version for unit in found)
        records = tuple(self.records[step] for step in range(first, version))
        return Replay(
            position=position,
            version=version,
            units=found,
            records=records,
            last=self.records.get(version - 1),
            next=self.records.get(version) if self._is_judged(version) else None,
        )

    def why_not(self, position: int, version: int, lost: Collection[int] = ()) -> str:
        """Return why a position cannot be made at a version, naming a unit; empty if it can."""
        del lost
        held = self._units.get(position, {})
        if not held:
            return f"no store holds anything of position {position}"
        num_units = max(u.num_units for copies in held.values() for _, u in copies)
        for number in range(num_units):
            copies = held.get(number, [])
            if not copies:
                return f"no store holds unit {number} of position {position}"
            if version in self._reach_of_unit(copies):
                continue
            pods = self._name_pods(holder for holder, _ in copies)
            states = sorted({v for _, u in copies for v in u.states}) or "none"
            return (
                f"unit {copies[0][1].unit_name} of position {position} does not reach version "
                f"{version}: its states at {states} and the gradients since, on {pods}, have gaps"
            )
        return ""

    def _reach_of_unit(self, copies: Sequence[tuple[Holder, UnitHeld]]) -> frozenset[int]:
        """Return the versions that a unit can be brought to.

        A state counts if the votes on the step at its version are known: they judged it. So every
        replay has a step at which the whole is compared with what votes told.
        """
        steps = {
            step
            for _, held in copies
            for run in held.gradients
            for step in range(run.first, run.last + 1)
            if self._is_judged(step)
        }
        reached: set[int] = set()
        states = {v for _, held in copies for v in held.states if self._is_judged(v)}
        for state in sorted(states):
            version = state
            reached.add(version)
            while version in steps and version + 1 not in reached:
                version += 1
                reached.add(version)
        return frozenset(reached)

    def _plan_unit(
        self, position: int, unit: int, copies: Sequence[tuple[Holder, UnitHeld]], version: int
    ) -> UnitReplay | None:
        kept = {v for _, held in copies for v in held.states}
        states = {v for v in kept if v <= version and self._is_judged(v)}
        steps = {
            step: _holders_of_step(copies, step) for step in range(min(states, default=0), version)
        }
        usable = [
            v for v in states if all(steps[s] and self._is_judged(s) for s in range(v, version))
        ]
        if not usable:
            return None
        newest = max(usable)

        def key(kind: SegmentKind, at: int) -> SegmentKey:
            return SegmentKey(
                lineage=self._lineage, position=position, unit=unit, kind=kind, version=at
            )

        return UnitReplay(
            unit=unit,
            name=copies[0][1].unit_name,
            state=key(SegmentKind.STATE, newest),
            state_holders=tuple(holder for holder, held in copies if newest in held.states),
            gradients=tuple(
                (key(SegmentKind.GRADIENT, step), steps[step]) for step in range(newest, version)
            ),
        )


def _of_most(units: Mapping[int, _Copies]) -> dict[int, _Copies]:
    """Return what counts of a position's units: copies that tell as many of them as most do.

    Each copy tells the number of its unit, and how many the position has. Where a store has one of
    these wrong, this copy counts for nothing, and those of other pods do.
    """
    size = agreed_number(
        (unit, held.num_units) for unit, copies in units.items() for _, held in copies
    )
    of_size = {
        unit: [(holder, held) for holder, held in copies if held.num_units == size]
        for unit, copies in units.items()
        if unit < size
    }
    return {unit: copies for unit, copies in of_size.items() if copies}


def _without(held: UnitHeld, bad: Collection[SegmentKey]) -> UnitHeld:
    """Return what is held of a unit without what was found damaged."""
    mine = [key for key in bad if (key.position, key.unit) == (held.position, held.unit)]
    states = {key.version for key in mine if key.kind is SegmentKind.STATE}
    steps = {key.version for key in mine if key.kind is SegmentKind.GRADIENT}
    versions = {key.version for key in mine if key.kind is SegmentKind.COMPUTE}
    if not mine:
        return held
    left = tuple(version for version in held.states if version not in states)
    return replace(
        held,
        states=left,
        gradients=_runs_without(held.gradients, steps),
        computes=_runs_without(held.computes, versions),
    )


def _runs_without(held: Sequence[Run], bad: Collection[int]) -> tuple[Run, ...]:
    runs = []
    for run in held:
        first = run.first
        for step in sorted(step for step in bad if run.first <= step <= run.last):
            if first < step:
                runs.append(Run(first=first, last=step - 1))
            first = step + 1
        if first <= run.last:
            runs.append(Run(first=first, last=run.last))
    return tuple(runs)


def _holders_of_step(copies: Sequence[tuple[Holder, UnitHeld]], step: int) -> tuple[Holder, ...]:
    return tuple(
        holder
        for holder, held in copies
        if any(run.first <= step <= run.last for run in held.gradients)
    )


def points_to_apply(applied: Collection[int], differing: Collection[int]) -> bool:
    """Return whether a wrong apply explains better than wrong copies what a step has come to.

    Each unit starts from a copy of its own. What all units of a step have in common is how it was
    applied: scale, rate, and the device. So where two units or more come out wrong, and none comes
    out right, one mistake in that is likelier than one in each copy. It is no proof.

    Args:
        applied: units to which the step was applied.
        differing: those of them that are not as votes told.
    """
    return len(applied) > 1 and frozenset(applied) == frozenset(differing)
