"""Writes segments into the memory of this trainer's pod, each with its header and its holders."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mainstay_core.base.ids import JobUid
from mainstay_core.rank.replays.authors import Authorship
from mainstay_core.segments.evictions import needed_in
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentHeader, SegmentKey, SegmentKind, seal
from mainstay_train.snapshots.measurements import Leg
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.rooms import AskedRoom, Room
from mainstay_train.state.segments import SegmentClient
from mainstay_train.state.store_connection import StoreGone


@dataclass(frozen=True, slots=True)
class Place:
    """The part of all keys and headers that this trainer writes in a quorum."""

    plan: Plan
    index: int
    lineage: int
    own: Authorship
    units: UnitBytes

    @property
    def position(self) -> int:
        """The trainer's position."""
        return self.plan.position_of(self.index)

    def key(self, name: str, kind: SegmentKind, version: int) -> SegmentKey:
        """Return the key of one of its units' segments."""
        return SegmentKey(
            lineage=self.lineage,
            position=self.position,
            unit=self.units.numbers[name],
            kind=kind,
            version=version,
        )


class Content(Protocol):
    """The bytes of a segment that is to be written."""

    @property
    def name(self) -> str:
        """Of what it is, for people."""

    @property
    def size_bytes(self) -> int: ...

    def write(self, memory: memoryview) -> None:
        """Copy the bytes to their place; waits for a device."""

    def digest(self, memory: memoryview) -> str:
        """Return the digest of the bytes as they lie there."""


@dataclass(frozen=True, slots=True)
class UnitContent:
    """The bytes of a unit's state, compute weights or gradient."""

    units: UnitBytes
    key: SegmentKey
    known_digest: str | None = None
    """Of what is copied; None where nobody has computed it."""

    @property
    def name(self) -> str:
        """The unit's."""
        return self.units.names[self.key.unit]

    @property
    def size_bytes(self) -> int:
        """Bytes of the segment."""
        return self.units.size_bytes(self.key.unit, self.key.kind)

    def write(self, memory: memoryview) -> None:
        """Copy the unit there; waits for a device."""
        self.units.write(self.key.unit, self.key.kind, memory)

    def digest(self, memory: memoryview) -> str:
        """Return the digest of the unit as it lies there, and of its key."""
        known = self.known_digest or self.units.digest(self.key.unit, self.key.kind, memory)
        return seal(self.key, known)


class Took(NamedTuple):
    """The time that it took to write a segment."""

    copy_ns: int
    digest_ns: int


class SegmentWriter:
    """Writes segments, and gives them to the store of this trainer's pod.

    Args:
        job: to which they belong.
        client: of the store.
        note_copy: takes what a leg of a unit's way took: its bytes, and nanoseconds.
    """

    def __init__(
        self, job: JobUid, client: SegmentClient, note_copy: Callable[[Leg, int, int], None]
    ) -> None:
        self._job, self._client, self._note_copy = job, client, note_copy
        self.fingerprint = ""
        """Digest of the job's numerics fingerprint."""
        self.window: Window | None = None
        """The one in flight."""
        self.keep_from = 0
        """Version from which on holders keep what they have."""

    def rooms(self, place: Place, keys: Sequence[SegmentKey]) -> Generator[AskedRoom]:
        """Ask for room for segments of units, one after the other, one ahead of the one at hand.

        Each that is given must be written by :meth:`write_unit` before the next one is taken. A
        segment that was written before frees its room only then, so none is asked for ahead for it:
        a step that is logged again takes no more room than it has. What was asked for ahead is
        given back when this is closed.

        Raises:
            StoreGone: the store has ended.
        """
        asked = deque[AskedRoom]()

        def ask(key: SegmentKey) -> None:
            size_bytes = place.units.size_bytes(key.unit, key.kind)
            asked.append(self._ask_room(key, size_bytes, self.window))

        try:
            for number, key in enumerate(keys):
                if not asked:
                    ask(key)
                for ahead in keys[number + 1 : number + 2]:
                    if not self._client.has_written(ahead):
                        ask(ahead)
                yield asked.popleft()
        finally:
            for room in asked:
                self._client.decline_room(room)

    def _ask_room(self, key: SegmentKey, size_bytes: int, window: Window | None) -> AskedRoom:
        """Ask for room; older segments may go for what a window needs."""
        first = window.first if window else 0
        return self._client.ask_room(size_bytes, needed_in(key, first))

    def write_unit(
        self,
        place: Place,
        key: SegmentKey,
        left: Callable[[], None] = lambda: None,
        digest: str | None = None,
        place_in_order: int = 0,
        asked: AskedRoom | None = None,
        window: Window | None = None,
    ) -> None:
        """Write a unit's segment and give it to the store. The rest is as :meth:`write` says.

        Args:
            place: this trainer's, as the plan says.
            key: of the segment.
            left: called once the unit may change again.
            digest: of the unit; None where nobody has computed it.
            place_in_order: of a unit's state in the order of the window.
            asked: the room that :meth:`rooms` asked for.
            window: of which a state is copied.
        """
        content = UnitContent(place.units, key, digest)
        took = self.write(
            place,
            key,
            content,
            place.own.holders,
            left,
            place_in_order,
            asked=asked,
            window=window,
        )
        self._note_copy(Leg.COPY, content.size_bytes, took.copy_ns)
        if digest is None:
            self._note_copy(Leg.HOST, content.size_bytes, took.digest_ns)

    def write(
        self,
        place: Place,
        key: SegmentKey,
        content: Content,
        holders: Sequence[Holder],
        left: Callable[[], None] = lambda: None,
        place_in_order: int = 0,
        may_evict: bool = True,
        asked: AskedRoom | None = None,
        window: Window | None = None,
    ) -> Took:
        """Write a segment and give it to the store.

        Args:
            place: this trainer's, as the plan says.
            key: of the segment.
            content: its bytes.
            holders: other pods that keep it.
            left: called once what is copied may change again, whatever comes of it.
            place_in_order: of a unit's state in the order of the window.
            may_evict: whether older segments may go to give room to it.
            asked: its room, if the store was asked before.
            window: for which it is written; None: the one that is in flight now.

        Returns:
            What the copy and its digest took.

        Raises:
            StoreFull: there is no room for it.
            StoreGone: the store has ended.
        """
        # Once it has left, the state may be written, and the next window may begin.
        window = window or self.window
        try:
            if asked is None:
                asked = self._ask_room(key, content.size_bytes, window if may_evict else None)
            room = self._client.take_room(asked)
            began_ns = time.monotonic_ns()
            with self._given_back_if_broken(room):  # by the device
                content.write(room.memory)
        finally:
            left()
        copied_ns = time.monotonic_ns()
        with self._given_back_if_broken(room):
            digest = content.digest(room.memory)
        took = Took(copied_ns - began_ns, time.monotonic_ns() - copied_ns)
        header = SegmentHeader(
            key=key,
            job=self._job,
            fingerprint=self.fingerprint,
            unit_name=content.name,
            num_units=len(place.units.names),
            nonce=place.plan.quorum.nonce,
            window=window.first if window else 0,
            num_instalments=window.length if window else 0,
            size_bytes=room.memory.nbytes,
            digest=digest,
            place=place_in_order,
            quorum=place.plan.quorum.id,
        )
        self._client.written(room, header, holders, self.keep_from)
        return took

    @contextmanager
    def _given_back_if_broken(self, room: Room) -> Generator[None]:
        try:
            yield
        except BaseException:
            with suppress(StoreGone):  # which takes back all
                self._client.give_back(room)
            raise
