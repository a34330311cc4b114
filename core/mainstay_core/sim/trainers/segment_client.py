"""A trainer's connections to stores of segments, on a network that is played.

As ``mainstay_train.state.segments``. Frames travel as in :mod:`mainstay_core.sim.segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mainstay_core.segments.frames import (
    AskReport,
    Discard,
    Doubt,
    Fetch,
    KeepFrom,
    KeepRecord,
    Missing,
    Reported,
    VotedLogs,
    Written,
)
from mainstay_core.segments.frames import Held as HeldEverywhere
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Process, Signal, Steps
from mainstay_core.sim.network import End
from mainstay_core.sim.segments import ANSWER_S, Frame
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.wire.plan import OtherStore
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, StoreReport
from mainstay_core.wire.votes import CommitRecord


class Wait:
    """A wait for stores, which ends with its quorum."""

    def __init__(self, changed: Signal) -> None:
        self._changed = changed
        self.ended = ""

    def shutdown(self, why: str) -> None:
        """End the wait."""
        self.ended = why or "ended"
        self._changed.fire()

    def is_over(self) -> bool:
        """Whether it was ended."""
        return bool(self.ended)


class SegmentClient:
    """A trainer's connection to the store of its pod, and its way to those of others.

    Args:
        world: everything around it.
        process: the trainer.
        address: of its pod's store.
        changed: fired with everything that may end a wait.
        note_held: called with a segment that all its holders have.
    """

    def __init__(
        self,
        world: Surroundings,
        process: Process,
        address: str,
        changed: Signal,
        note_held: Callable[[SegmentKey], None] = lambda _: None,
    ) -> None:
        self._world, self._process, self._changed = world, process, changed
        self.address, self._note_held = address, note_held
        self._end: End | None = None
        self._queue: list[Frame] = []
        self._ended = ""
        self._num_requests = 0
        self._of_request: dict[int, SegmentKey] = {}
        self._why_not: dict[SegmentKey, str | None] = {}
        """Of what this trainer wrote: why it is not at its holders; None while that is open."""
        self._voted: dict[int, str | None] = {}
        """By request which logs are lacking on which a vote rests; None while that is open."""
        self._reports: dict[int, StoreReport] = {}
        world.network.connect(process, address, self._opened, self._over)

    def _opened(self, end: End) -> None:
        self._end = end
        end.on_message, end.on_end = self._came, self._over
        for frame in self._queue:
            end.send(frame)

    def _over(self, why: str) -> None:
        self._ended = why
        self._changed.fire()

    def _send(self, message: object, content: terms.UnitTerm | None = None) -> None:
        if self._end is None:
            self._queue.append((message, content))
        else:
            self._end.send((message, content))

    def _came(self, frame: Frame) -> None:
        message, _ = frame
        if isinstance(message, HeldEverywhere):
            if message.request not in self._of_request:  # of a vote, which may be over
                self._voted[message.request] = message.why_not
                self._changed.fire()
                return
            key = self._of_request.pop(message.request)
            if key not in self._of_request.values():  # else a newer one of this key is under way
                self._why_not[key] = message.why_not
                if not message.why_not:
                    self._note_held(key)
        else:
            self._reports[message.request] = message.report
        self._changed.fire()

    def _number(self) -> int:
        self._num_requests += 1
        return self._num_requests

    # Writing ------------------------------------------------------------------------

    def write(
        self,
        header: SegmentHeader,
        content: terms.UnitTerm,
        holders: Sequence[Holder],
        keep_from: int,
    ) -> None:
        """Have the store keep a segment, and send it to holders."""
        number = self._number()
        self._of_request[number], self._why_not[header.key] = header.key, None
        holding = tuple(holders)
        message = Written(request=number, header=header, holders=holding, keep_from=keep_from)
        self._send(message, content)

    def is_held(self, key: SegmentKey) -> bool:
        """Whether what was written last of a key is at all its holders."""
        return self._why_not.get(key) == ""

    def wait_answered(self, keys: Sequence[SegmentKey], until: Callable[[], bool]) -> Steps[None]:
        """Wait until the holders of all have answered, or are gone."""
        while (
            any(self._why_not.get(k, "") is None for k in keys) and not until() and not self._ended
        ):
            yield self._changed

    def why_not(self, key: SegmentKey) -> str:
        """Return why what was written last of a key is not kept; empty while that is open, too."""
        return self._why_not.get(key) or ""

    def vote_on(self, logs: VotedLogs, until: Callable[[], bool]) -> Steps[bool]:
        """Tell the store on which logs a vote rests; return whether it has them."""
        number = self._number()
        self._voted[number] = None
        self._send(replace(logs, request=number))
        while self._voted[number] is None and not until() and not self._ended:
            yield self._changed
        return self._voted.pop(number) == ""

    def record(self, record: CommitRecord) -> None:
        """Have the store keep a commit."""
        self._send(KeepRecord(record=record))

    def keep_from(
        self,
        lineage: int,
        version: int,
        *,
        may_go_back: bool = False,
        drops_later: bool = True,
    ) -> None:
        """Have the store drop what is older, and what is later if the job goes on from there."""
        self._send(
            KeepFrom(
                lineage=lineage,
                version=version,
                may_go_back=may_go_back,
                drops_later=drops_later,
            )
        )

    def discard(self, key: SegmentKey) -> None:
        """Have the store drop a segment that is damaged."""
        self._send(Discard(key=key))

    def withdraw(self, key: SegmentKey) -> None:
        """Have the store keep a segment no more: it is of what counts no more."""
        self._why_not.pop(key, None)
        self._send(Discard(key=key, is_outdated=True))

    def doubt(
        self, holder: Holder, header: SegmentHeader, until: Callable[[], bool]
    ) -> Steps[None]:
        """Tell another pod's store that a segment which was read there is damaged."""
        message = Doubt(key=header.key, nonce=header.nonce, digest=header.digest)
        yield from self._ask_other(holder.address, message, until)

    # Reading ------------------------------------------------------------------------

    def report_of(
        self, other: OtherStore, lineage: int, until: Callable[[], bool]
    ) -> Steps[StoreReport]:
        """Return what the store of another pod holds; nothing if it does not answer."""
        ask = AskReport(request=0, lineage=lineage)
        answer, _ = yield from self._ask_other(other.address, ask, until)
        if isinstance(answer, Reported):
            report: StoreReport = answer.report
            return report
        problem = "it did not answer"
        return StoreReport(pod=other.pod, address="", lineage=lineage, problem=problem)

    def report(self, lineage: int) -> Steps[StoreReport | None]:
        """Return what the store holds; None if it is gone."""
        number = self._number()
        self._send(AskReport(request=number, lineage=lineage))
        while number not in self._reports and not self._ended:
            yield self._changed
        return self._reports.pop(number, None)

    def fetch(
        self, key: SegmentKey, holder: Holder, until: Callable[[], bool], nonce: str = ""
    ) -> Steps[Frame]:
        """Return what a holder answers when it is asked for a segment; Missing if it does not.

        Args:
            key: of the segment.
            holder: that is asked.
            until: what ends the wait.
            nonce: of the quorum in which it has to be written; empty for any. Then the holder
                answers once it has it.
        """
        message = Fetch(key=key, nonce=nonce)
        return (yield from self._ask_other(holder.address, message, until, waits=bool(nonce)))

    def _ask_other(
        self,
        address: str,
        message: Fetch | AskReport | Doubt,
        until: Callable[[], bool],
        *,
        waits: bool = False,
    ) -> Steps[Frame]:
        """Return what the store of another pod answers; Missing if it does not.

        Args:
            address: of the store.
            message: what it is asked.
            until: what ends the wait.
            waits: whether it may take as long as it likes.
        """
        answers: list[Frame] = []

        def came(frame: Frame) -> None:
            answers.append(frame)
            self._changed.fire()

        def failed(_: str) -> None:
            came((Missing(), None))

        def opened(end: End) -> None:
            if answers:
                end.close()
                return
            end.on_message, end.on_end = came, failed
            end.send((message, None))
            ends.append(end)

        ends: list[End] = []
        self._world.network.connect(self._process, address, opened, failed, ANSWER_S)
        if not waits:
            self._process.after(ANSWER_S, failed, "does not answer")
        while not answers and not until():
            yield self._changed
        for end in ends:
            end.close()
        answers.append((Missing(), None))
        return answers[0]
