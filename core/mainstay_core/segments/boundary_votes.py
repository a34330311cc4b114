"""Knows which votes rest on the boundary logs of one pod's store.

What crossed the boundary of a stage is kept by micro-batch. It counts once its sender has voted on
the step in the quorum that it names (:class:`~mainstay_core.segments.frames.VotedLogs`). Other
bytes in its place count anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mainstay_core.segments.frames import VotedLogs
from mainstay_core.wire.segments import LogsHeld, SegmentKey, SegmentKind, boundary_key, runs_of

LogPlace = tuple[int, int, int]
"""(position, step, shard type)"""


@dataclass(slots=True)
class _Voted:
    """The votes that rest on the boundary logs of one type in one step."""

    quorums: set[str]
    kinds: tuple[SegmentKind, ...]
    micro_batches: int


class BoundaryVotes:
    """The votes on boundary logs of the lineage that a store keeps.

    Args:
        is_kept: whether the store keeps a boundary log now.
    """

    def __init__(self, is_kept: Callable[[SegmentKey], bool]) -> None:
        self._is_kept = is_kept
        self._voted: dict[LogPlace, _Voted] = {}

    def note(self, voted: VotedLogs) -> str:
        """Note that a vote rests on logs; return which one is lacking, empty if none is.

        If one is lacking, none of them counts for this vote.
        """
        if not voted.kinds:  # there is no log that its end could take along
            return ""
        for shard_type in voted.types:
            for key in _keys(voted, shard_type):
                if not self._is_kept(key):
                    return f"{key} is not kept"
        for shard_type in voted.types:
            place = voted.position, voted.step, shard_type
            known = self._voted.get(place)
            quorums = {voted.quorum}
            # After a loss of one kind, earlier votes do not rest on what was written in its place.
            if known is not None and known.kinds == voted.kinds:
                quorums |= known.quorums
            self._voted[place] = _Voted(quorums, voted.kinds, voted.micro_batches)
        return ""

    def forget(self, key: SegmentKey) -> None:
        """Drop the votes that rest on a log whose bytes are others now."""
        self._voted.pop((key.position, key.version, key.shard_type), None)

    def keep_whole(self, lineage: int) -> None:
        """Drop what votes say of a kind of which some log is not kept any more.

        Args:
            lineage: of all that is kept.
        """
        kept: dict[LogPlace, _Voted] = {}
        for (position, step, shard_type), voted in self._voted.items():
            kinds = tuple(
                kind
                for kind in voted.kinds
                if all(
                    self._is_kept(key)
                    for key in _keys_of_type(
                        lineage, position, kind, step, shard_type, voted.micro_batches
                    )
                )
            )
            if kinds:
                kept[position, step, shard_type] = replace(voted, kinds=kinds)
        self._voted = kept

    def keep_steps(self, *, first: int = 0, stop: int | None = None) -> None:
        """Drop the votes on steps before ``first``, and on ``stop`` and later ones."""
        self._voted = {
            place: voted
            for place, voted in self._voted.items()
            if first <= place[1] and (stop is None or place[1] < stop)
        }

    def clear(self) -> None:
        """Drop all votes."""
        self._voted.clear()

    def list_runs(self, lineage: int, counts: Callable[[SegmentKey], bool]) -> list[LogsHeld]:
        """Return the logs that votes rest on, of types and steps that follow each other at once.

        Linear in the logs, but for sorting.

        Args:
            lineage: of all that is kept.
            counts: whether a log that is kept does; one that does not leaves its type out.
        """
        types: dict[tuple[int, SegmentKind, str, int, int], list[int]] = {}
        for (position, step, shard_type), voted in sorted(self._voted.items()):
            for kind in voted.kinds:
                keys = _keys_of_type(lineage, position, kind, step, shard_type, voted.micro_batches)
                if all(self._is_kept(key) and counts(key) for key in keys):
                    for quorum in voted.quorums:
                        at = position, kind, quorum, voted.micro_batches, step
                        types.setdefault(at, []).append(shard_type)
        told: list[LogsHeld] = []
        open_runs: dict[tuple[int, SegmentKind, str, int, int, int], int] = {}
        """Where in ``told`` the run of these types was told last."""
        for (position, kind, quorum, size, step), found in sorted(types.items()):
            for run in runs_of(found):
                shape = position, kind, quorum, size, run.first, run.last
                last = open_runs.get(shape)
                if last is not None and told[last].last_step == step - 1:
                    told[last] = replace(told[last], last_step=step)
                    continue
                open_runs[shape] = len(told)
                told.append(
                    LogsHeld(
                        position=position,
                        kind=kind,
                        voted_in=quorum,
                        first_step=step,
                        last_step=step,
                        first_type=run.first,
                        last_type=run.last,
                        micro_batches=size,
                    )
                )
        return sorted(told, key=lambda log: (log.last_step, log))


def _keys_of_type(
    lineage: int, position: int, kind: SegmentKind, step: int, shard_type: int, micro_batches: int
) -> list[SegmentKey]:
    return [
        boundary_key(lineage, position, kind, step, shard_type, micro_batch)
        for micro_batch in range(micro_batches)
    ]


def _keys(voted: VotedLogs, shard_type: int) -> list[SegmentKey]:
    at, size = voted.position, voted.micro_batches
    return [
        key
        for kind in voted.kinds
        for key in _keys_of_type(voted.lineage, at, kind, voted.step, shard_type, size)
    ]
