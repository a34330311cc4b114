"""Writes segments into the memory of this trainer's pod, and reads segments wherever they are.

The pod's store gives a trainer its arena. The trainer asks for room, writes the bytes there, and
says so with the segment's header and its holders. From then on the store has it, and sends it to
the holders; that the trainer dies changes nothing any more. A trainer that dies earlier has written
nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mainstay_core.base.errors import MainstayError, RemoteProtocolError, brief
from mainstay_core.segments import frames
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, StoreReport
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.state.arena import read_at
from mainstay_train.state.digest_client import DigestClient
from mainstay_train.state.rooms import AskedRoom, Room, StoreFull
from mainstay_train.state.segment_reader import ReaderEnded, SegmentReader
from mainstay_train.state.store_connection import StoreConnection, StoreGone

logger = logging.getLogger(__name__)


class SegmentMissing(MainstayError):  # noqa: N818 - a state, not a failure
    """No store that was asked has a segment."""

    def __init__(self, text: str, lacking: Sequence[Holder | None] = ()) -> None:
        super().__init__(text)
        self.lacking = tuple(lacking)
        """Who answered, without it; None: the store of this pod."""


class Fetched(NamedTuple):
    """A segment that was read."""

    header: SegmentHeader
    holder: Holder | None
    """Whose copy it is; None: that of this pod's own store."""


@dataclass(slots=True)
class _Written:
    """A segment that this trainer wrote."""

    header: SegmentHeader | None = None  # None: of a vote that rests on logs
    why_not: str | None = None
    """Why it is not at all its holders; empty if it is, None while that is open."""
    sent_bytes: int = 0
    """To all other pods together."""
    began_ns: int = 0


def socket_beside(path: str) -> str:
    """Return the socket of a pod's store, given that of its supervisor."""
    return str(Path(path).with_name(frames.SOCKET_NAME))


class SegmentClient:
    """A trainer's connection to the store of segments of its pod, and its way to other stores.

    All methods may be called from any thread. Whoever waits here is woken by :meth:`shutdown`.

    Args:
        path: Unix socket of the store (:func:`socket_beside`).
        slot: of the trainer.
        incarnation: this life of the trainer.
        local: address to call other pods from.

    Raises:
        OSError: the store is not there.
        RemoteProtocolError: who is there is no store.
    """

    def __init__(self, path: str, slot: int, incarnation: str, local: str) -> None:
        self._reader = SegmentReader(local)
        self._written: dict[SegmentKey, _Written] = {}
        self._lineage = 0
        """The newest one of which a segment was written."""
        self._unheld: dict[int, _Written] = {}
        """Those whose holders have not all answered, by the request to send them."""
        self.note_sent: Callable[[int, int], None] = lambda _size_bytes, _elapsed_ns: None
        """Called when all holders have a segment: with the bytes sent, and what that took."""
        self.note_held: Callable[[SegmentHeader], None] = lambda _header: None
        """Called likewise with its header, if no other pod keeps it, too; it must not wait."""
        self._store = StoreConnection(path, slot, incarnation, self._note_held)
        self.digests = DigestClient(self._store, self._reader)
        """Of units in steps."""
        self._changed = self._store.changed
        """Guards what is written; notified with everything that may end a wait."""

    def shutdown(self, why: str) -> None:
        """End every wait and all later calls; returns at once.

        The store keeps what is written. It hears of the end once no room of this trainer is open:
        a room whose owner has left is given to others, while a thread may still write into it.
        """
        self._store.end(why)
        self._reader.shutdown(why)
        self._store.hang_up_if_done()

    def poke(self) -> None:
        """Have whoever waits here ask again whether anything can come of it."""
        with self._changed:
            self._changed.notify_all()

    # Writing ---------------------------------------------------------------------

    def room(self, size: int, window: int = 0) -> Room:
        """Return room for a segment. It must be written or given back.

        Args:
            size: of the segment, in bytes.
            window: first version of the window in flight, if it needs the segment: where the store
                is full, what is older goes.

        Raises:
            StoreFull: there is none.
            StoreGone: the store cannot be asked.
        """
        return self.take_room(self.ask_room(size, window))

    def ask_room(self, size: int, window: int = 0) -> AskedRoom:
        """Ask for room as :meth:`room` does, without waiting for it. It must be taken or declined.

        Raises:
            StoreGone: the store cannot be asked.
        """
        number = self._store.open_room()
        try:
            self._store.send(frames.TakeRoom(request=number, size=size, window=window))
        except MainstayError:
            self._store.close_room(number)
            raise
        return AskedRoom(number, size)

    def take_room(self, asked: AskedRoom) -> Room:
        """Return the room that was asked for. It must be written or given back.

        Raises:
            StoreFull: there is none.
            StoreGone: the store cannot be asked.
        """
        try:
            answer = self._store.answer_to(asked.number)
            if isinstance(answer, frames.Full):
                raise StoreFull(answer.why)
            assert isinstance(answer, frames.Room)
        except MainstayError:
            self._store.close_room(asked.number)
            raise
        return Room(self._store.arena[answer.offset : answer.offset + asked.size], asked.number)

    def decline_room(self, asked: AskedRoom) -> None:
        """Give back room that was asked for, if there was any."""
        # Who has none has nothing to give back, and a store that is gone takes back all.
        with suppress(StoreFull, StoreGone):
            self.give_back(self.take_room(asked))

    def give_back(self, room: Room) -> None:
        """Give back a room into which nothing will be written.

        Raises:
            StoreGone: the store cannot be asked; it takes the room back all the same.
        """
        try:
            self._store.send(frames.GiveBack(request=room.number))
        finally:
            self._store.close_room(room.number)

    def written(
        self, room: Room, header: SegmentHeader, holders: Sequence[Holder], keep_from: int
    ) -> None:
        """Have the store keep a segment whose bytes are all in their room, and send it to holders.

        Args:
            room: of the size that the header names; it is nobody's to write to any more.
            header: of the segment.
            holders: pods that are to keep it too, at most ``MAX_HOLDERS``; none, or this one: fine.
            keep_from: version from which on holders keep states, gradients and records.

        Raises:
            StoreGone: the store cannot be asked. It does not have the segment.
        """
        message = frames.Written(
            request=room.number, header=header, holders=tuple(holders), keep_from=keep_from
        )
        with self._changed:
            if header.key.lineage > self._lineage:
                self._lineage = header.key.lineage
                self._drop_older(self._lineage, 0)
            sent = _Written(
                header=header,
                sent_bytes=header.size_bytes * len(holders),
                began_ns=time.monotonic_ns(),
            )
            self._written[header.key] = self._unheld[room.number] = sent
        try:
            self._store.send(message)
        finally:
            self._store.close_room(room.number)

    def voted_logs(self, voted: frames.VotedLogs) -> str:
        """Have boundary logs count for a step, if all of them are kept.

        Args:
            voted: which logs, and the vote that rests on them; its number is given here.

        Returns:
            Why they do not count; empty if they do.

        Raises:
            StoreGone: the store cannot be asked.
        """
        with self._changed:
            number = self._store.next_number()
            answer = self._unheld[number] = _Written()
        self._store.send(replace(voted, request=number))
        with self._changed:
            self._changed.wait_for(
                lambda: answer.why_not is not None or self._store.ended is not None
            )
            if answer.why_not is None:
                raise StoreGone(str(self._store.ended))
            return answer.why_not

    def wait_held(
        self, keys: Collection[SegmentKey], until: Callable[[], bool] = lambda: False
    ) -> str:
        """Wait until all holders of some segments have confirmed them.

        Args:
            keys: of segments that were written here.
            until: whether to wait no longer; asked again after :meth:`poke`, under a lock.

        Returns:
            An empty sentence once all are held; else why one of them is not.
        """
        unconfirmed: list[SegmentKey] = []

        def all_confirmed() -> bool:
            # Asked whenever something is confirmed: what is confirmed already is not looked at.
            while unconfirmed and not self._is_open(unconfirmed[-1]):
                unconfirmed.pop()
            if not unconfirmed:  # one may have been written again
                unconfirmed.extend(filter(self._is_open, keys))
            return not unconfirmed

        with self._changed:
            self._changed.wait_for(
                lambda: self._store.ended is not None or until() or all_confirmed()
            )
            lacking = [key for key in keys if self._why_not_held(key)]
            return self._why_not_held(min(lacking)) if lacking else ""

    def pending(self) -> dict[SegmentKey, str]:
        """Return the segments written here, and needed, that are not at all their holders.

        Each has the sentence why not, which is empty while the segment is on its way.
        """
        with self._changed:
            found = {key: written.why_not for key, written in self._written.items()}
        return {key: why_not or "" for key, why_not in found.items() if why_not != ""}

    def has_written(self, key: SegmentKey) -> bool:
        """Return whether a segment was written here before that may be kept, and is needed."""
        with self._changed:
            return key in self._written

    def _note_held(self, answer: frames.Held) -> None:
        """Note what holders have confirmed. Called by the reader thread, under the lock."""
        for request in (answer.request, *answer.also):
            written = self._unheld.pop(request, None)
            if written is None:
                raise RemoteProtocolError("an answer to nothing")
            written.why_not = answer.why_not
            if written.sent_bytes and not answer.why_not:
                self.note_sent(written.sent_bytes, time.monotonic_ns() - written.began_ns)
            if written.header is not None and not answer.why_not:
                self.note_held(written.header)

    def _is_open(self, key: SegmentKey) -> bool:
        written = self._written.get(key)
        return written is not None and written.why_not is None

    def _why_not_held(self, key: SegmentKey) -> str:
        written = self._written.get(key)
        if written is None:
            return f"{key} was not written here, or is needed no more"
        if written.why_not is None:
            return self._store.ended or f"{key} was not waited for any longer"
        return f"{key} is not at {written.why_not}" if written.why_not else ""

    # What is kept ----------------------------------------------------------------

    def record(self, record: CommitRecord) -> None:
        """Have the store keep the record of a commit.

        Raises:
            StoreGone: the store cannot be asked.
        """
        self._store.send(frames.KeepRecord(record=record))

    def keep_from(
        self,
        lineage: int,
        version: int,
        *,
        may_go_back: bool = False,
        drops_later: bool = True,
    ) -> None:
        """Have the store drop states of older versions, gradients and records of older steps.

        Args:
            lineage: to which the version belongs.
            version: from which on all is kept.
            may_go_back: the job goes on from this version, which may be an older one.
            drops_later: nothing later counts, where it does.

        Raises:
            StoreGone: the store cannot be asked.
        """
        with self._changed:
            self._drop_older(lineage, version)
            self._changed.notify_all()
        self._store.send(
            frames.KeepFrom(
                lineage=lineage,
                version=version,
                may_go_back=may_go_back,
                drops_later=drops_later,
            )
        )

    def report_of(self, address: str, lineage: int, timeout_s: float) -> StoreReport:
        """Return what the store of another pod has of a lineage (:meth:`SegmentReader.report`)."""
        return self._reader.report(address, lineage, timeout_s)

    def _drop_older(self, lineage: int, version: int) -> None:
        self._written = {
            key: written
            for key, written in self._written.items()
            if key.lineage > lineage or (key.lineage == lineage and key.version >= version)
        }

    def report(self, lineage: int) -> StoreReport:
        """Return what the store of this pod has of a lineage.

        Raises:
            StoreGone: the store cannot be asked.
        """
        number = self._store.next_number()
        answer = self._store.ask(number, frames.AskReport(request=number, lineage=lineage))
        assert isinstance(answer, frames.Reported)
        return answer.report

    # Reading ---------------------------------------------------------------------

    def fetch(
        self, key: SegmentKey, holders: Sequence[Holder], into: memoryview, *, own: bool = True
    ) -> Fetched:
        """Read a segment from this pod's store if it has it, else from the first holder that has.

        Nothing here checks the digest that the header names. Whoever finds that it is another one
        tells this pod's store (:meth:`discard`), or asks again without the holder it came from.

        Args:
            key: of the segment.
            holders: other pods that may have it, in the order in which they are asked.
            into: receives the bytes; as long as the segment, and void if this raises.
            own: whether the copy of this pod's store counts.

        Raises:
            SegmentMissing: nobody has it, or can be asked; the sentence names the key and whoever
                was asked.
            StoreGone: the store of this pod cannot be asked, or this side was shut down.
        """
        into = into.cast("B")
        if not own:
            return self._first(key, holders, into, own=False)
        with self._reading(key) as found:
            if found is not None and found.header.size_bytes == into.nbytes:
                read_at(self._store.fd, found.offset, into)
                return Fetched(found.header, None)
        return self._first(key, holders, into, own=True)

    def fetch_awaited(
        self,
        key: SegmentKey,
        nonce: str,
        holder: Holder,
        into: memoryview,
        ended: Callable[[], str],
    ) -> SegmentHeader:
        """Read a segment that is being made, as soon as its pod's store has it.

        Args:
            key: of the segment.
            nonce: of the quorum in which it is written.
            holder: pod in whose store it appears, which may be this one.
            into: receives the bytes; as long as the segment, and void if this raises.
            ended: returns why nobody waits any longer; asked again after :meth:`interrupt`.

        Raises:
            SegmentMissing: its store cannot be asked, or nobody waits any longer.
            StoreGone: this side was shut down.
        """
        into = into.cast("B")
        while not ended():
            try:
                return self._reader.fetch_awaited(holder.address, key, nonce, into, ended)
            except ReaderEnded as error:
                raise StoreGone(str(error)) from error
            except TimeoutError:
                continue  # it is not there yet
            except (OSError, ValueError, OverflowError, RemoteProtocolError) as error:
                why = f"{holder.pod} ({holder.address}): {brief(error)}"
                raise SegmentMissing(ended() or f"{key} did not come; {why}") from error
        raise SegmentMissing(ended())

    def interrupt(self) -> None:
        """Have whoever waits here, or reads from another store, ask again what can come of it."""
        self._reader.interrupt()
        self.poke()

    def discard(self, key: SegmentKey) -> None:
        """Have this pod's store keep a segment no more: its bytes are bad.

        Raises:
            StoreGone: the store cannot be asked.
        """
        self._store.send(frames.Discard(key=key))

    def withdraw(self, key: SegmentKey) -> None:
        """Have this pod's store keep a segment no more, if it has it: its writer has other bytes.

        Raises:
            StoreGone: the store cannot be asked.
        """
        self._store.send(frames.Discard(key=key, is_outdated=True))

    def doubt(self, holder: Holder, header: SegmentHeader) -> bool:
        """Tell a store that a segment which was read there is damaged; return whether it knows.

        A store that cannot be told counts no more, or is asked by the next reader.
        """
        try:
            self._reader.doubt(holder.address, header)
        except (OSError, ValueError, OverflowError, MainstayError) as error:
            logger.info("%s is not told of its damaged copy: %s", holder.pod, brief(error))
            return False
        return True

    @contextmanager
    def _reading(self, key: SegmentKey) -> Iterator[frames.Found | None]:
        """Have a segment of this pod's store stay where it is; None if it does not have it."""
        number = self._store.next_number()
        answer = self._store.ask(number, frames.Read(request=number, key=key))
        try:
            yield answer if isinstance(answer, frames.Found) else None
        finally:
            if isinstance(answer, frames.Found):
                self._store.send(frames.ReadDone(request=number))

    def _first(
        self, key: SegmentKey, holders: Sequence[Holder], into: memoryview, *, own: bool
    ) -> Fetched:
        """Ask holders until one has the segment, which this pod lacks if its copy counts."""
        asked = [f"this pod: {'it does not have it' if own else 'its copy does not count'}"]
        lacking: list[Holder | None] = [None] if own else []
        for holder in holders:
            try:
                header = self._reader.fetch(holder.address, key, into)
            except ReaderEnded as error:
                raise StoreGone(str(error)) from error
            except (OSError, ValueError, OverflowError, RemoteProtocolError) as error:
                asked.append(f"{holder.pod} ({holder.address}): {brief(error)}")
                if isinstance(error, RemoteProtocolError):
                    lacking.append(holder)  # it has another one in its place
                continue
            if header is not None:
                return Fetched(header, holder)
            lacking.append(holder)
            asked.append(f"{holder.pod} ({holder.address}): it does not have it")
        told = f"nobody has the {key} of lineage {key.lineage}; {'; '.join(asked)}"
        raise SegmentMissing(told, lacking)
