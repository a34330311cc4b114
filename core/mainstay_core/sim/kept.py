"""Checks that the memory of pods keeps what ranks tell each other of it, and that it is used.

What is checked follows from what was confirmed to whoever wrote it, not from what stores report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Violation
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import SegmentKey, SegmentKind, StoreReport
from mainstay_core.wire.votes import SettleReport

Places = frozenset[str]
"""Addresses of stores."""


class Store(Protocol):
    """A pod's store, as far as it is looked into."""

    @property
    def is_open(self) -> bool:
        """Whether it lives, and never lacked room for what came."""

    @property
    def from_version(self) -> int:
        """The version from which on it keeps all."""

    def keeps(self, key: SegmentKey) -> bool:
        """Whether a segment is there."""


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
        self.stores: dict[str, Store] = {}
        """All stores that ever were, by address."""
        self._needed_from: dict[int, int] = {}
        """By lineage: before this version nothing is kept."""

    def held(self, key: SegmentKey, content: terms.UnitTerm, places: Places) -> None:
        """All holders of a segment have confirmed it."""
        self._held[key].append((content, places))

    def damaged(self, address: str, key: SegmentKey) -> None:
        """A segment is damaged where it lies."""
        self._damaged.add((address, key))

    def mended(self, address: str, key: SegmentKey) -> None:
        """A segment is written where a damaged one may have been."""
        self._damaged.discard((address, key))

    def lacking(
        self, keys: Iterable[SegmentKey], addresses: Sequence[str], peers: int
    ) -> list[SegmentKey]:
        """Return which segments are at too few of some stores, though all holders had them once.

        Args:
            keys: of segments that may be needed.
            addresses: of all stores that a plan names.
            peers: other pods that are to keep each.
        """
        stores = [self.stores[address] for address in addresses]
        if not all(store.is_open for store in stores):
            return []
        oldest = max(store.from_version for store in stores)
        wanted = 1 + min(peers, len(stores) - 1)
        return [
            key
            for key in sorted(keys)
            if key.version >= oldest
            and self._held[key]
            and not any((address, key) in self._damaged for address in addresses)
            and sum(store.keeps(key) for store in stores) < wanted
        ]

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
        named = {host.pod for host in plan.hosts} | {other.pod for other in plan.other_stores}
        _hold(
            named == {store.pod for store in stores},
            f"I7: {plan.quorum} names stores of {sorted(named)}, and hears of others or of fewer",
        )
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
