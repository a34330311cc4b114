"""Chooses by which record of a commit a replay goes, from those that pods' stores tell.

A record has the scale and the digests by which all that is made anew is judged. So a damaged one
would have good copies of segments blamed, or would scale a gradient wrongly. Each record is sealed
by its writer, and one whose seal does not fit is left out. All ranks are told the same, and choose
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.segments.records import quorum_of
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import Commit, CommitRecord, is_sealed

MAX_NAMED = 3
"""Damaged records, and steps with records that contradict each other, that one sentence names."""

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
    disputed: tuple[tuple[int, tuple[PodUid, ...]], ...]
    """Steps of which one quorum has left different records, all as they were written, and the
    pods that have these. None of them counts."""

    @property
    def faults(self) -> str:
        """Say what was wrong, naming pods and steps; empty if nothing was."""
        whys = [
            f"the record of step {step} on {pod} is damaged and does not count"
            for pod, step in self.damaged
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
    it before. Of these the first one counts, by pod, that has what the votes said; a rank that
    rolled forward has not seen that. If none has it, that of an older quorum does that agrees.

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
    disputed: list[tuple[int, tuple[PodUid, ...]]] = []
    for step, of_step in sorted(told.items()):
        if not of_step:
            continue
        counted = _choose(of_step)
        if counted is not None:
            chosen[step] = counted
        else:
            disputed.append((step, tuple(pod for pod, _ in _of_newest_quorum(of_step))))
    return ToldRecords(
        chosen=chosen,
        certified={step: {r.certified_in for _, r in told[step]} for step in chosen},
        damaged=tuple(damaged),
        disputed=tuple(disputed),
    )


def _records_of(reports: Iterable[StoreReport]) -> Iterator[tuple[PodUid, CommitRecord]]:
    for report in sorted(reports, key=lambda r: r.pod):
        for record in report.records:
            yield report.pod, record


def _of_newest_quorum(told: _Told) -> _Told:
    newest = max(quorum_of(record) for _, record in told)
    return [(pod, record) for pod, record in told if quorum_of(record) == newest]


def _choose(told: _Told) -> CommitRecord | None:
    """Return the record of a step that counts; None if those of the newest quorum differ."""
    newest = [record for _, record in _of_newest_quorum(told)]
    first = newest[0]
    if any((r.commit, *_led_to(r)) != (first.commit, *_led_to(first)) for r in newest):
        return None
    judged = [r for r in newest if r.states]
    if judged:
        return judged[0] if all(_said(r) == _said(judged[0]) for r in judged) else None
    like = [r for _, r in told if r.states and _came_to(r) == _came_to(first)]
    return like[0] if like and all(_said(r) == _said(like[0]) for r in like) else first


def _led_to(record: CommitRecord) -> tuple[str, str]:
    return record.chain, record.forks


def _said(record: CommitRecord) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the votes said of each position."""
    return record.gradients, record.states


def _came_to(record: CommitRecord) -> tuple[Commit, tuple[str, str]]:
    """Return what a step came to, whichever quorum committed it."""
    # Norms are told from the time on at which a job may go on approximately.
    return replace(record.commit, norms_sq=()), _led_to(record)
