"""A cache of a job's pods: the watch's index, corrected by what the operator did itself.

The watch tells everything, but a moment late, and what vanished while it was
cut off it never tells. So what the operator has just made counts before its
event comes, and a list, taken now and then, removes what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.observed import ObservedPod


class PodCache:
    """The pods of one job.

    Args:
        indexed: returns the pods that the watch has shown and not seen deleted.
    """

    def __init__(self, indexed: Callable[[], Iterable[ObservedPod]]) -> None:
        self._indexed = indexed
        self._made: dict[PodUid, ObservedPod] = {}
        """Made by us, not yet shown by the watch."""
        self._gone: set[PodUid] = set()
        """Not there any more, though the watch has not said so."""
        self.last_words: dict[PodUid, ObservedPod] = {}
        """Deleted pods as they were at the very end; whoever has used them removes them."""

    def list(self) -> tuple[ObservedPod, ...]:
        """Return the pods that exist, as far as is known."""
        pods = {p.uid: p for p in self._indexed()}
        self._gone &= pods.keys()
        for uid in [uid for uid in self._made if uid in pods]:
            del self._made[uid]
        return tuple(p for uid, p in {**self._made, **pods}.items() if uid not in self._gone)

    def note_made(self, pods: Iterable[ObservedPod]) -> None:
        """Learn of pods that were just made."""
        self._made |= {p.uid: p for p in pods}

    def note_deleted(self, pod: ObservedPod) -> None:
        """Learn from the watch that a pod is no more, and how it was at the end."""
        self._made.pop(pod.uid, None)
        self.last_words[pod.uid] = pod

    def apply_list(self, listed: Iterable[ObservedPod], since: Iterable[PodUid]) -> bool:
        """Learn from a list which pods there are; return whether something was wrong.

        Args:
            listed: what the list has shown; it is no older than the question.
            since: uids that were known before the list was asked for: what came
                later may be missing in it.
        """
        there = {p.uid: p for p in listed}
        known = {p.uid for p in self.list()}
        missing = {uid for uid in since if uid not in there} & known
        self._gone = (self._gone | missing) - there.keys()
        for uid in missing:
            self._made.pop(uid, None)
        unseen = [p for uid, p in there.items() if uid not in known and uid not in self.last_words]
        self.note_made(unseen)
        return bool(missing or unseen)
