"""Chooses by which record of a commit a replay goes, from those that pods' stores tell.

A record has the scale and the digests by which all that is made anew is judged. So a damaged one
would have good copies of segments blamed, or would scale a gradient wrongly. Each record is sealed
by its writer, and one whose seal does not fit is left out. All ranks are told the same, and choose
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.segments.records import quorum_of
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import Commit, CommitRecord, is_sealed

MAX_NAMED = 3
"""Damaged records, those that differ from that of most pods, and steps with records that
contradict each other, that one sentence names."""

_Told = list[tuple[PodUid, CommitRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRecords:
    """The records by which replays of one lineage go, and what was wrong with others."""

    chosen: dict[int, CommitRecord]
    """By step."""
    certified: dict[int, set[str]]
    """By step the quorums (as text) that are known to have committed it."""
    damaged: tuple[tuple[PodUid, int], ...]
    """Pods with damaged records, and the step that each of these names."""
    outvoted: tuple[tuple[PodUid, int], ...]
    """Pods whose record of a step is another one than most tell, though it is as it was written,
    and the step."""
    disputed: tuple[tuple[int, tuple[PodUid, ...]], ...]
    """Steps of which one quorum has left different records, all as they were written and none told
    by most, and the pods that have these. None of them counts."""

    @property
    def faults(self) -> str:
        """Say what was wrong, naming pods and steps; empty if nothing was."""
        whys = [
            f"the record of step {step} on {pod} is damaged and does not count"
            for pod, step in self.damaged
        ]
        whys += [
            f"the record of step {step} on {pod} differs from that of most pods and does not count"
            for pod, step in self.outvoted
        ]
        whys += [
            f"the records of step {step} on {', '.join(pods)} differ, so that none of them counts"
            for step, pods in self.disputed
        ]
        left = len(whys) - MAX_NAMED
        more = f"; the same is said of {count(left, 'more record')}" if left > 0 else ""
        return cut("".join(f"; {why}" for why in whys[:MAX_NAMED]) + more)


def choose_records(reports: Sequence[StoreReport], lineage: int) -> ToldRecords:
    """Return which records count.

    Of one step those of the newest quorum count: where the job went back, another one had committed
    it before. Of these the one counts that more than half of their pods tell; if there is none, no
    record does. A rank that rolled forward has not seen what the votes said: that counts which more
    than half tell of those that have it. If none has it, that of an older quorum does that agrees.

    Args:
        reports: of stores of that lineage, in any order.
        lineage: that counts.
    """
    told: dict[int, _Told] = {}
    damaged: list[tuple[PodUid, int]] = []
    for pod, record in _records_of(reports):
        of_step = told.setdefault(record.commit.step, [])
        # Most stores tell the same: what equals a record that is as it was written is so, too.
        if not any(record == known for _, known in of_step) and not is_sealed(record):
            damaged.append((pod, record.commit.step))
        elif record.lineage == lineage:
            of_step.append((pod, record))
    chosen: dict[int, CommitRecord] = {}
    certified: dict[int, set[str]] = {}
    outvoted: list[tuple[PodUid, int]] = []
    disputed: list[tuple[int, tuple[PodUid, ...]]] = []
    for step, of_step in sorted(told.items()):
        if not of_step:
            continue
        counted, others = _choose(of_step)
        if counted is not None:
            chosen[step] = counted
            certified[step] = {r.certified_in for pod, r in of_step if pod not in others}
            outvoted += [(pod, step) for pod in others]
        else:
            disputed.append((step, tuple(pod for pod, _ in _of_newest_quorum(of_step))))
    return ToldRecords(
        chosen=chosen,
        certified=certified,
        damaged=tuple(damaged),
        outvoted=tuple(outvoted),
        disputed=tuple(disputed),
    )


def _records_of(reports: Iterable[StoreReport]) -> Iterator[tuple[PodUid, CommitRecord]]:
    for report in sorted(reports, key=lambda r: r.pod):
        for record in report.records:
            yield report.pod, record


def _of_newest_quorum(told: _Told) -> _Told:
    newest = max(quorum_of(record) for _, record in told)
    return [(pod, record) for pod, record in told if quorum_of(record) == newest]


def _choose(told: _Told) -> tuple[CommitRecord | None, tuple[PodUid, ...]]:
    """Return the record of a step that counts, and the pods of the newest quorum that tell another.

    None: no record of that quorum is told by more than half of its pods.
    """
    newest = _of_newest_quorum(told)
    most = _told_by_most(newest, lambda record: (record.commit, *_led_to(record)))
    judged = [(pod, record) for pod, record in most if record.states]
    counted = _told_by_most(judged, _said)
    if not most or (judged and not counted):
        return None, ()
    right = {pod for pod, record in most if not record.states} | {pod for pod, _ in counted}
    outvoted = tuple(pod for pod, _ in newest if pod not in right)
    if counted:
        return counted[0][1], outvoted
    first = most[0][1]
    like = [r for _, r in told if r.states and _came_to(r) == _came_to(first)]
    agrees = bool(like) and all(_said(r) == _said(like[0]) for r in like)
    return (like[0] if agrees else first), outvoted


def _told_by_most(told: _Told, key: Callable[[CommitRecord], object]) -> _Told:
    """Return those that tell what strictly more than half of these pods tell; else none."""
    for _, record in told:
        same = [(pod, other) for pod, other in told if key(other) == key(record)]
        if 2 * len(same) > len(told):
            return same
    return []


def _led_to(record: CommitRecord) -> tuple[str, str]:
    return record.chain, record.forks


def _said(record: CommitRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the votes said of each position."""
    return record.gradients, record.states


def _came_to(record: CommitRecord) -> tuple[Commit, tuple[str, str]]:
    """Return what a step came to, whichever quorum committed it."""
    # Norms are told from the time on at which a job may go on approximately.
    return replace(record.commit, norms_sq=()), _led_to(record)
