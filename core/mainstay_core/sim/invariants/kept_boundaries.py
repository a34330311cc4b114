"""Remembers which boundary logs stores have confirmed, and which stages were replayed together."""

from __future__ import annotations

from collections import defaultdict

from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.settle import Settlement
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.sim import terms
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.wire.segments import SegmentKey, SegmentKind, boundary_key

Places = frozenset[str]
"""Addresses of stores."""


class KeptBoundaries:
    """The boundary logs that stores have confirmed, and the votes that rest on them.

    Args:
        micro_batches: of each shard type.
        promises: whether stores have room for what a replay writes.
    """

    def __init__(self, micro_batches: int, *, promises: bool) -> None:
        self._micro_batches, self.promises = micro_batches, promises
        self.complete_from: dict[int, int] = {}
        """By lineage the first version of the window that was complete last."""
        self._content: dict[tuple[str, SegmentKey], terms.UnitTerm] = {}
        self._votes: defaultdict[tuple[str, int, int, int, int], set[str]] = defaultdict(set)
        """By address, lineage, position, step and type the quorums of votes that rest on it."""
        self._stretches: tuple[set[Stretch], int] = set(), -1
        """Those of the newest settle, and its version."""

    def held(self, key: SegmentKey, content: terms.UnitTerm, places: Places) -> None:
        """A store has confirmed a log. Other bytes than before have no votes."""
        for place in places:
            if self._content.get((place, key), content) != content:
                at = place, key.lineage, key.position, key.version, key.shard_type
                self._votes.pop(at, None)
            self._content[place, key] = content

    def withdrawn(self, address: str, key: SegmentKey) -> None:
        """A store has a log no more, and no vote rests on it."""
        self._content.pop((address, key), None)
        at = address, key.lineage, key.position, key.version, key.shard_type
        self._votes.pop(at, None)

    def voted(self, address: str, logs: VotedLogs) -> None:
        """A store was told of a vote."""
        for shard_type in logs.types:
            at = address, logs.lineage, logs.position, logs.step, shard_type
            self._votes[at].add(logs.quorum)

    def counts(self, address: str, logs: VotedLogs) -> bool:
        """Return whether a store has confirmed logs and was told of the vote on them."""
        return not logs.kinds or all(
            logs.quorum in self._votes[address, logs.lineage, logs.position, logs.step, shard_type]
            and all(
                (address, key) in self._content
                for kind in logs.kinds
                for key in self._keys(logs.lineage, logs.position, kind, logs.step, shard_type)
            )
            for shard_type in logs.types
        )

    def is_kept(
        self,
        lineage: int,
        position: int,
        kind: SegmentKind,
        step: int,
        shard_type: int,
        certified: set[str],
        here: Places,
        damaged: set[tuple[str, SegmentKey]],
    ) -> bool:
        """Return whether a type's logs are in some store, undamaged, and a certified vote's."""
        keys = self._keys(lineage, position, kind, step, shard_type)
        return any(
            certified & self._votes[address, lineage, position, step, shard_type]
            and all((address, k) in self._content and (address, k) not in damaged for k in keys)
            for address in here
        )

    def _keys(
        self, lineage: int, position: int, kind: SegmentKind, step: int, shard_type: int
    ) -> list[SegmentKey]:
        return [
            boundary_key(lineage, position, kind, step, shard_type, micro_batch)
            for micro_batch in range(self._micro_batches)
        ]

    def replays(self, outcome: Settlement) -> list[str]:
        """Return what a settle makes of lost stages, in words that can be counted.

        A loss during replays enlarges the stretch beside which it lies, hits a stretch inside, or
        leaves it as it was.
        """
        before, at = self._stretches
        found = {r.stretch for r in outcome.replays.values() if isinstance(r, BoundaryReplay)}
        self._stretches = found, outcome.version
        if at != outcome.version:
            before = set()
        enlarged = {s for s in found if any(s != b and {*b.stages} < {*s.stages} for b in before)}
        others = found - before - enlarged
        words = ["stretch" for _ in found - before]
        words += ["stretch enlarged" for _ in enlarged]
        words += ["stretch again" for _ in found & before]
        words += ["stretch beside another loss" for _ in found & before if others]
        return words
