"""Checks that the memory of pods keeps what ranks tell each other of it, and that it is used.

What is checked follows from what was confirmed to whoever wrote it, not from what stores report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mainstay_core.rank.events import Snapshot
from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.sim import terms
from mainstay_core.sim.invariants.holding import hold
from mainstay_core.sim.invariants.kept_boundaries import KeptBoundaries, Places
from mainstay_core.sim.invariants.resends import Resends
from mainstay_core.sim.invariants.units import key_of, unit_number
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import (
    BOUNDARY_KINDS,
    SegmentKey,
    SegmentKind,
    StoreReport,
)
from mainstay_core.wire.votes import SettleReport, is_sealed


class Store(Protocol):
    """A pod's store, as far as it is looked into."""

    @property
    def is_open(self) -> bool:
        """Whether it lives, and never lacked room for what came."""

    @property
    def is_sending(self) -> bool:
        """Whether something that it sends again is not answered, or finds nobody to take it."""

    @property
    def from_version(self) -> int:
        """The version from which on it keeps all."""

    def has_adopted(self, plan: Plan) -> bool:
        """Whether a plan is the newest that it has sent again for."""

    def keeps(self, key: SegmentKey) -> bool:
        """Whether a segment is there."""

    def gave_up(self, key: SegmentKey) -> bool:
        """Whether a segment went as one of a window that was given up."""

    def lists(self, key: SegmentKey, address: str) -> bool:
        """Whether a segment is there, and another store is on the list of its holders."""


class Kept:
    """The segments that holders have confirmed, and checks of what becomes of them.

    Args:
        num_units: returns the units of a position.
        truths: returns the states of all positions at a version, in runs that meet nothing but the
            forks of some state of a lineage.
        boundaries: what is known of boundary logs, in a job that has them.
    """

    def __init__(
        self,
        num_units: Callable[[int], int],
        truths: Callable[[int, int], Sequence[tuple[str, ...]]],
        boundaries: KeptBoundaries | None,
    ) -> None:
        self._num_units, self._truths, self._boundaries = num_units, truths, boundaries
        self._held: defaultdict[SegmentKey, list[tuple[terms.UnitTerm, Places]]]
        self._held = defaultdict(list)
        """Each time that all holders of a segment had it: its bytes, and where."""
        self._counting: set[SegmentKey] = set()
        """The segments that holders have confirmed since the job last went back before them."""
        self._damaged: set[tuple[str, SegmentKey]] = set()
        """With the addresses of stores: copies that are damaged, or had to give room."""
        self._evicted: set[tuple[str, SegmentKey]] = set()
        """Those that had to give room."""
        self.resends = Resends()
        self.stores: dict[str, Store] = {}
        """All stores that ever were, by address."""
        self._windows: dict[tuple[str, int], Window] = {}
        """That in which members copy at a version of a quorum."""
        self._copied: dict[tuple[str, Window, int, int], tuple[int, int]] = {}
        """Who copies a unit of a position in a window of a quorum, and at which version."""
        self._needed_from: dict[int, int] = {}
        """By lineage: before this version nothing is kept."""

    def copies(self, plan: Plan, index: int, action: Snapshot) -> None:
        """A member is about to copy its units of an instalment."""
        name, window = str(plan.quorum), action.window
        known = self._windows.setdefault((name, action.version), window)
        hold(known == window, f"I7: at {action.version} of {name} is {window}, and {known}")
        for unit in action.units:
            if not unit.is_full:
                continue  # compute weights are copied at each version until the state is
            key = (name, window, plan.position_of(index), unit_number(unit.name))
            first = self._copied.setdefault(key, (index, action.version))
            hold(
                first == (index, action.version),
                f"I7: member {index} copies unit {unit.name} at {action.version} of {window}, "
                f"which member {first[0]} copies at {first[1]}",
            )

    def held(self, key: SegmentKey, content: terms.UnitTerm, places: Places) -> None:
        """All holders of a segment have confirmed it."""
        if self._boundaries is not None and key.kind in BOUNDARY_KINDS:
            self._boundaries.held(key, content, places)
        self._held[key].append((content, places))
        self._counting.add(key)

    def complete_from(self, lineage: int) -> int:
        """Return the first version of the newest window that some rank has called complete."""
        return self._needed_from.get(lineage, 0)

    def damaged(self, address: str, key: SegmentKey) -> None:
        """A segment is damaged where it lies."""
        self._damaged.add((address, key))

    def written(self, address: str, key: SegmentKey, *, is_whole: bool) -> None:
        """A segment is written where a damaged one may have been.

        No store sees a damage by itself. So what it sends again may be damaged, and promises as
        little there as where it came from: its next reader has it dropped.
        """
        self._evicted.discard((address, key))
        self.resends.written(address, key)
        if is_whole:
            self._damaged.discard((address, key))
        else:
            self._damaged.add((address, key))

    def evicted(self, address: str, keys: Iterable[SegmentKey]) -> None:
        """Segments had to give room to what the window in flight needs: they promise nothing."""
        gone = {(address, key) for key in keys}
        self._damaged |= gone
        self._evicted |= gone

    def lacking(
        self, keys: Iterable[SegmentKey], addresses: Sequence[str], peers: int
    ) -> list[SegmentKey]:
        """Return which segments are at too few of some stores, though all holders had them once.

        What the job went back from does not count: stores of pods without a member may still have
        it, and those of members have dropped it. Nor does a state that a store took for one of a
        window that was given up: it may have been, or all who knew better are dead. Then the store
        keeps the window before. Nor what had not come to a store when its sender was lost.

        Args:
            keys: of segments that may be needed.
            addresses: of all stores that a plan names.
            peers: other pods that are to keep each.
        """
        stores = {address: self.stores[address] for address in addresses}
        if not all(store.is_open for store in stores.values()):
            return []
        oldest = max(store.from_version for store in stores.values())
        wanted = 1 + min(peers, len(stores) - 1)
        return [
            key
            for key in sorted(keys)
            if key.version >= oldest
            and key in self._counting
            and not any((address, key) in self._damaged for address in addresses)
            and wanted
            > sum(
                store.keeps(key) or store.gave_up(key) or self.resends.was_cut_off(key, at, stores)
                for at, store in stores.items()
            )
        ]

    def logged(self, name: str, keys: Sequence[SegmentKey], reduced: str) -> None:
        """A rank tells in its vote that the gradient which it has reduced is kept."""
        for key in keys:
            newest = self._held[key][-1:]
            hold(
                [content for content, _ in newest] == [terms.unit_of(key.unit, reduced)],
                f"I7: {name} votes that {key} is at its holders, which have not got it",
            )

    def voted(self, address: str, logs: VotedLogs) -> None:
        """A store was told that a vote rests on boundary logs, and has them."""
        assert self._boundaries is not None
        self._boundaries.voted(address, logs)

    def withdrawn(self, address: str, key: SegmentKey) -> None:
        """A store has dropped a boundary log since its writer no longer holds the type."""
        assert self._boundaries is not None
        self._boundaries.withdrawn(address, key)

    def logged_boundaries(self, name: str, address: str, logs: VotedLogs) -> None:
        """A rank tells in its vote that what it gave its neighbours is kept."""
        assert self._boundaries is not None
        hold(
            self._boundaries.counts(address, logs),
            f"I7: {name} votes that its boundary logs of step {logs.step} are in its store, which "
            "does not have them",
        )

    def went_back(self, lineage: int) -> None:
        """A rank goes on from a checkpoint: nothing that was confirmed before counts.

        Of older versions nothing is needed, and who had heard of a later window has dropped them.
        """
        self._counting = {k for k in self._counting if k.lineage != lineage}
        self._needed_from.pop(lineage, None)
        if self._boundaries is not None:
            self._boundaries.complete_from.pop(lineage, None)

    def needless(
        self, name: str, plan: Plan, lineage: int, version: int, newest: int, *, by_votes: bool
    ) -> None:
        """A rank has its store drop what is older than ``version``; it has ``newest`` itself.

        Args:
            name: of the trainer.
            plan: that it has adopted.
            lineage: of the state.
            version: from which on all is kept.
            newest: version that the rank has.
            by_votes: whether votes of the plan's quorum say so. Else it is told as it settles, of
                a window of a quorum before: one of its own may begin at that very version.
        """
        is_first = version > self._needed_from.get(lineage, -1)
        self._needed_from[lineage] = max(version, self._needed_from.get(lineage, 0))
        if self._boundaries is not None:
            self._boundaries.complete_from[lineage] = version
        versions = range(version, newest + 1)
        for position in range(len(plan.positions)):
            for unit in range(self._num_units(position)):
                turns = self._turns(plan, position, unit, versions) if by_votes else versions
                kept = [v for v in turns if self._was_held(lineage, position, unit, v)]
                if self._boundaries is not None:
                    # Until it is there in full, there are the weights that it computes with.
                    kept = [
                        v
                        for v in kept
                        if all(
                            self._was_held(lineage, position, unit, at, SegmentKind.COMPUTE)
                            for at in range(version, v)
                        )
                    ]
                hold(
                    bool(kept),
                    f"I7: {name} has all before version {version} dropped, but no good state of "
                    f"unit {unit} of position {position} was at its holders since",
                )
                if is_first:  # later others may have begun the next window, for which it may go
                    self._check_stayed(name, lineage, position, unit, versions, turns)

    def _turns(self, plan: Plan, position: int, unit: int, versions: range) -> range:
        """Return the versions at which a complete window may have copied a unit.

        Of a window of this quorum that is known: none if nobody has copied it. Of one of a quorum
        before, of which members hear as they settle, it is any.
        """
        name, first = str(plan.quorum), versions.start
        window = self._windows.get((name, first))
        if window is None or window.first != first:
            return versions
        copied = self._copied.get((name, window, position, unit))
        return range(0) if copied is None else range(copied[1], copied[1] + 1)

    def _check_stayed(
        self, name: str, lineage: int, position: int, unit: int, versions: range, turns: range
    ) -> None:
        """Check that nothing gave room which a window needs that is complete now.

        It needs the state that it has copied itself. One that was given up may have copied the unit
        at another of these versions: such a copy goes first where room is short.
        """
        needed = {
            SegmentKind.STATE: turns,
            SegmentKind.COMPUTE: range(versions.start, turns.stop - 1),
            SegmentKind.GRADIENT: versions,
        }
        for kind, needed_at in needed.items():
            for version in needed_at:
                key = key_of(lineage, position, unit, kind, version)
                hold(
                    key not in self._counting or not self._gave_room(key),
                    f"I7: {name} calls the window at {versions.start} complete, but {key} had to "
                    "give room at a holder",
                )

    def _gave_room(self, key: SegmentKey) -> bool:
        """Return whether a holder that confirmed a segment last has dropped it for others."""
        return any(
            (place, key) in self._evicted for _, places in self._held[key][-1:] for place in places
        )

    def _went_for_damaged(self, address: str, key: SegmentKey) -> bool:
        """Return whether a store let a state of a window that was given up go for another one.

        That one is damaged, which no store sees by itself. It is of the complete window before, or
        of the window in flight, which has become complete since.
        """
        return self.stores[address].gave_up(key) and any(
            other.version != key.version and replace(other, version=key.version) == key
            for place, other in self._damaged - self._evicted
            if place == address
        )

    def _was_held(
        self,
        lineage: int,
        position: int,
        unit: int,
        version: int,
        kind: SegmentKind = SegmentKind.STATE,
    ) -> bool:
        key = key_of(lineage, position, unit, kind, version)
        right = {terms.unit_of(unit, truth[position]) for truth in self._truths(lineage, version)}
        if kind is SegmentKind.COMPUTE:
            right = {terms.compute_weights(unit_term) for unit_term in right}
        return any(content in right for content, _ in self._held[key])

    def settled(
        self,
        plan: Plan,
        reports: Sequence[SettleReport],
        stores: Sequence[StoreReport],
        outcome: Settlement,
    ) -> None:
        """A quorum has settled, and its stores were asked."""
        named = {host.pod for host in plan.hosts} | {other.pod for other in plan.other_stores}
        hold(
            named == {store.pod for store in stores},
            f"I7: {plan.quorum} names stores of {sorted(named)}, and hears of others or of fewer",
        )
        durable = max(r.durable for r in reports)
        hold(
            StateAction.REPLAY not in outcome.actions or outcome.version >= durable,
            f"I7: {plan.quorum} makes step {outcome.version} anew ({outcome.reason}), though the "
            f"checkpoint of step {durable} is complete",
        )
        promised = self._promised(plan, reports, stores)
        lost = StateAction.LOAD in outcome.actions or outcome.version < promised
        hold(
            promised < max(1, durable) or not lost,
            f"I7: {plan.quorum} goes to step {outcome.version} ({outcome.reason}), though memory "
            f"was told to keep step {promised}",
        )

    def _promised(
        self, plan: Plan, reports: Sequence[SettleReport], stores: Sequence[StoreReport]
    ) -> int:
        """Return the newest version that members hold, or that pods here confirmed to keep."""
        here = frozenset(s.address for s in stores if s.address)
        of_lineage = (s for s in stores if s.lineage == plan.lineage)
        kept = [r for s in of_lineage for r in s.records if is_sealed(r)]
        records = {r.commit.step for r in kept}
        exact = {r.commit.step for r in kept if not r.forks}
        stayed = [
            r
            for r in reports
            if r.valid and r.lineage == plan.lineage and r.settled >= plan.members[r.index].since
        ]
        told = {r.version for r in stayed}
        if self._boundaries is not None:
            return self._promised_by_boundaries(plan, stores, stayed, here)
        for version in range(max({*told, *(s + 1 for s in records)}, default=0), 0, -1):
            if version not in told and version - 1 not in exact:
                continue
            if all(
                self._reaches(plan.lineage, position, version, here, records)
                if not (mine := [r for r in stayed if r.index in {m.index for m in members}])
                else any(r.version == version for r in mine)
                for position, members in enumerate(plan.positions)
            ):
                return version
        return 0

    def _promised_by_boundaries(
        self,
        plan: Plan,
        stores: Sequence[StoreReport],
        stayed: Sequence[SettleReport],
        here: Places,
    ) -> int:
        """The same, where lost stages are computed again from the newest complete window.

        A later window that was given up promises nothing, whatever of it is still there.
        """
        assert self._boundaries is not None
        start = self._boundaries.complete_from.get(plan.lineage)
        of_position = [
            {r.version for r in stayed if r.index in {m.index for m in members}}
            for members in plan.positions
        ]
        told = set().union(*of_position)
        if start is None or not self._boundaries.promises:
            common = set.intersection(*of_position)
            return max(common, default=0)
        certified: dict[int, set[str]] = {}
        judged: set[int] = set()
        exact: set[int] = set()
        for store in stores:
            for record in store.records:
                if record.lineage == plan.lineage and is_sealed(record):
                    certified.setdefault(record.commit.step, set()).add(record.certified_in)
                    judged |= {record.commit.step} if record.states else set()
                    exact |= set() if record.forks else {record.commit.step}
        for version in range(max({*told, *(s + 1 for s in certified)}, default=0), 0, -1):
            if version not in told and version - 1 not in exact:
                continue
            # Of a stage that lost one inner rank all compute again, also those that are left.
            width = plan.ranks_per_stage
            lost_stages = {p // width for p, versions in enumerate(of_position) if not versions}
            lost = [p for p in range(len(of_position)) if p // width in lost_stages]
            if all(version in versions for versions in of_position if versions) and all(
                self._computes_again(plan, position, start, version, lost, certified, judged, here)
                for position in lost
            ):
                return version
        return 0

    def _computes_again(
        self,
        plan: Plan,
        position: int,
        start: int,
        version: int,
        lost: Sequence[int],
        certified: Mapping[int, set[str]],
        judged: set[int],
        here: Places,
    ) -> bool:
        """Return whether one position of a lost stage can be computed again from what was kept."""
        assert self._boundaries is not None
        steps = range(start, version)
        if not judged.issuperset(steps):
            return False

        def keeps(kind: SegmentKind, unit: int, at: int) -> bool:
            key = key_of(plan.lineage, position, unit, kind, at)
            return any(
                any((place, key) not in self._damaged for place in places & here)
                for _, places in self._held[key][-1:]
            )

        units_are_there = all(
            any(
                state in judged
                and keeps(SegmentKind.STATE, unit, state)
                and all(keeps(SegmentKind.COMPUTE, unit, at) for at in range(start, state))
                for state in range(start, version + 1)
            )
            for unit in range(self._num_units(position))
        )
        borders = [
            (at, kind)
            for at, kind in (
                (position - plan.ranks_per_stage, SegmentKind.ACTIVATION),
                (position + plan.ranks_per_stage, SegmentKind.INPUT_GRADIENT),
            )
            if 0 <= at < len(plan.positions) and at not in lost
        ]
        return units_are_there and all(
            self._boundaries.is_kept(
                plan.lineage, at, kind, step, shard_type, certified[step], here, self._damaged
            )
            for at, kind in borders
            for step in steps
            for shard_type in range(len(plan.suppliers))
        )

    def _reaches(
        self, lineage: int, position: int, version: int, here: Places, records: set[int]
    ) -> bool:
        def keeps(kind: SegmentKind, unit: int, at: int) -> bool:
            key = key_of(lineage, position, unit, kind, at)
            return key in self._counting and any(
                (place, key) not in self._damaged and not self._went_for_damaged(place, key)
                for _, places in self._held[key][-1:]
                for place in places & here
            )

        oldest = self._needed_from.get(lineage, 0)
        return all(
            any(
                # The votes on the step at a state judge it: without them nobody may start from it.
                state in records
                and keeps(SegmentKind.STATE, unit, state)
                and all(
                    step in records and keeps(SegmentKind.GRADIENT, unit, step)
                    for step in range(state, version)
                )
                for state in range(oldest, version + 1)
            )
            for unit in range(self._num_units(position))
        )
