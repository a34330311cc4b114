"""Checks that the memory of pods keeps what ranks tell each other of it, and that it is used.

What is checked follows from what was confirmed to whoever wrote it, not from what stores report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from mainstay_core.rank.events import Snapshot
from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Violation
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import SegmentKey, SegmentKind, StoreReport
from mainstay_core.wire.votes import SettleReport

Places = frozenset[str]
"""Addresses of stores."""


class Kept:
    """The segments that holders have confirmed, and checks of what becomes of them.

    Args:
        num_units: returns the units of a position.
        truth: returns the states of all positions at a version of the failure-free run.
    """

    def __init__(
        self, num_units: Callable[[int], int], truth: Callable[[int], tuple[str, ...]]
    ) -> None:
        self._num_units, self._truth = num_units, truth
        self._held: defaultdict[SegmentKey, list[tuple[terms.UnitTerm, Places]]]
        self._held = defaultdict(list)
        """Each time that all holders of a segment had it: its bytes, and where."""
        self._damaged: set[tuple[str, SegmentKey]] = set()
        self._windows: dict[tuple[str, int], Window] = {}
        """That in which members copy at a version of a quorum."""
        self._copied: dict[tuple[str, Window, int, str], tuple[int, int]] = {}
        """Who copies a unit of a position in a window, and at which version."""
        self._needed_from: dict[int, int] = {}
        """By lineage: before this version nothing is kept."""

    def copies(self, plan: Plan, index: int, action: Snapshot) -> None:
        """A member is about to copy its units of an instalment."""
        name, window = str(plan.quorum), action.window
        known = self._windows.setdefault((name, action.version), window)
        _hold(known == window, f"I7: at {action.version} of {name} is {window}, and {known}")
        for unit in action.units:
            key = (name, window, plan.position_of(index), unit.name)
            first = self._copied.setdefault(key, (index, action.version))
            _hold(
                first == (index, action.version),
                f"I7: member {index} copies unit {unit.name} at {action.version} of {window}, "
                f"which member {first[0]} copies at {first[1]}",
            )

    def held(self, key: SegmentKey, content: terms.UnitTerm, places: Places) -> None:
        """All holders of a segment have confirmed it."""
        self._held[key].append((content, places))

    def damaged(self, address: str, key: SegmentKey) -> None:
        """A segment is damaged where it lies."""
        self._damaged.add((address, key))

    def mended(self, address: str, key: SegmentKey) -> None:
        """A segment is written where a damaged one may have been."""
        self._damaged.discard((address, key))

    def logged(self, name: str, keys: Sequence[SegmentKey], reduced: str) -> None:
        """A rank tells in its vote that the gradient which it has reduced is kept."""
        for key in keys:
            newest = self._held[key][-1:]
            _hold(
                [content for content, _ in newest] == [terms.unit_of(key.unit, reduced)],
                f"I7: {name} votes that {key} is at its holders, which have not got it",
            )

    def needless(self, name: str, lineage: int, version: int, newest: int, width: int) -> None:
        """A rank has its store drop what is older than ``version``; it has ``newest`` itself.

        Args:
            name: of the trainer.
            lineage: of the state.
            version: from which on all is kept.
            newest: version that the rank has.
            width: positions of the job.
        """
        self._needed_from[lineage] = max(version, self._needed_from.get(lineage, 0))
        for position in range(width):
            for unit in range(self._num_units(position)):
                kept = [
                    v
                    for v in range(version, newest + 1)
                    if self._was_held(lineage, position, unit, v)
                ]
                _hold(
                    bool(kept),
                    f"I7: {name} has all before version {version} dropped, but no good state of "
                    f"unit {unit} of position {position} was at its holders since",
                )

    def _was_held(self, lineage: int, position: int, unit: int, version: int) -> bool:
        key = _key(lineage, position, unit, SegmentKind.STATE, version)
        right = terms.unit_of(unit, self._truth(version)[position])
        return any(content == right for content, _ in self._held[key])

    def settled(
        self,
        plan: Plan,
        reports: Sequence[SettleReport],
        stores: Sequence[StoreReport],
        outcome: Settlement,
    ) -> None:
        """A quorum has settled, and its stores were asked."""
        durable = max(r.durable for r in reports)
        _hold(
            StateAction.REPLAY not in outcome.actions or outcome.version >= durable,
            f"I7: {plan.quorum} makes step {outcome.version} anew ({outcome.reason}), though the "
            f"checkpoint of step {durable} is complete",
        )
        promised = self._promised(plan, reports, stores)
        lost = StateAction.LOAD in outcome.actions or outcome.version < promised
        _hold(
            promised < max(1, durable) or not lost,
            f"I7: {plan.quorum} goes to step {outcome.version} ({outcome.reason}), though memory "
            f"was told to keep step {promised}",
        )

    def _promised(
        self, plan: Plan, reports: Sequence[SettleReport], stores: Sequence[StoreReport]
    ) -> int:
        """Return the newest version that members hold, or that pods here confirmed to keep."""
        here = frozenset(s.address for s in stores if s.address)
        records = {r.commit.step for s in stores if s.lineage == plan.lineage for r in s.records}
        stayed = [
            r
            for r in reports
            if r.valid and r.lineage == plan.lineage and r.settled >= plan.members[r.index].since
        ]
        told = {r.version for r in stayed}
        for version in range(max({*told, *(s + 1 for s in records)}, default=0), 0, -1):
            if version not in told and version - 1 not in records:
                continue
            if all(
                self._reaches(plan.lineage, position, version, here, records)
                if not (mine := [r for r in stayed if r.index in {m.index for m in members}])
                else any(r.version == version for r in mine)
                for position, members in enumerate(plan.positions)
            ):
                return version
        return 0

    def _reaches(
        self, lineage: int, position: int, version: int, here: Places, records: set[int]
    ) -> bool:
        def keeps(kind: SegmentKind, unit: int, at: int) -> bool:
            key = _key(lineage, position, unit, kind, at)
            return any(
                any((place, key) not in self._damaged for place in places & here)
                for _, places in self._held[key][-1:]
            )

        oldest = self._needed_from.get(lineage, 0)
        return all(
            any(
                keeps(SegmentKind.STATE, unit, state)
                and all(
                    step in records and keeps(SegmentKind.GRADIENT, unit, step)
                    for step in range(state, version)
                )
                for state in range(oldest, version + 1)
            )
            for unit in range(self._num_units(position))
        )


def _key(lineage: int, position: int, unit: int, kind: SegmentKind, version: int) -> SegmentKey:
    return SegmentKey(lineage=lineage, position=position, unit=unit, kind=kind, version=version)


def _hold(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)
