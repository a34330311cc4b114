"""Reads segments for a replay, each from the first holder whose copy is as it was written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mainstay_core.base.ids import PodUid
from mainstay_core.base.words import count
from mainstay_core.wire.segments import (
    BadSegment,
    Holder,
    Holders,
    SegmentHeader,
    SegmentKey,
    seal,
)
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.segments import SegmentClient, SegmentMissing
from mainstay_train.state.store_connection import StoreGone

logger = logging.getLogger(__name__)

NOT_AS_WRITTEN = "has not the digest that it was written with"
"""What is wrong with a damaged copy."""
MAX_NAMED = 3
"""Copies that one sentence names."""


class Unusable(Exception):  # noqa: N818 - it ends a replay, and its text is told
    """No good copy of a segment is left, or the quorum has ended."""


class _Read(NamedTuple):
    """A copy that was read, and has its digest."""

    key: SegmentKey
    header: SegmentHeader
    holder: Holder


class GoodCopies:
    """The segments that one replay reads.

    Args:
        client: of the store of this trainer's pod.
        pod: this trainer's.
        ended: returns why the quorum has ended; empty while it has not.
    """

    def __init__(self, client: SegmentClient, pod: PodUid, ended: Callable[[], str]) -> None:
        self._client, self._pod, self._ended = client, pod, ended
        self.interrupt = client.interrupt
        """Wakes whoever waits for a segment here."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.bad: list[BadSegment] = []
        """Copies that were found damaged."""
        self._read_well: list[_Read] = []
        """Copies that have the digest that they were written with, and are not proven right."""
        self._lock = threading.Lock()
        """Guards the same: inputs are read ahead."""
        self.is_alone = True
        """Whether what is made follows from these copies alone, and not from what others make."""
        self.has_differed = False
        """Whether the same replay has come to something wrong before, and nobody was to blame."""
        self.differs = False
        """Whether what was made is another than votes told."""

    def go_on(self, ended: Callable[[], str]) -> None:
        """Read for another quorum; ``ended`` returns why that one has ended."""
        self._ended = ended

    def give_up_if(self, why: Callable[[], str]) -> None:
        """Have whoever waits for a segment give up for one more reason.

        Args:
            why: returns it, or an empty sentence; asked again after :attr:`interrupt`.
        """
        ended = self._ended
        self._ended = lambda: ended() or why()

    def blame(
        self,
        may_be_wrong: Callable[[SegmentKey], bool] = lambda _: True,
        *,
        is_certain: bool = False,
        may_be_apply: bool = False,
    ) -> str:
        """Have copies that were read and are not proven right count as damaged.

        What was made of them is wrong. Some copy is wrong as it was written, and nobody can tell
        which. Where others may have made the mistake, or this trainer as it applied a step, no copy
        is given up for it the first time. Their stores are told: no settle goes by these copies
        while this rank is a member, so they cover nothing.

        Args:
            may_be_wrong: returns whether a segment may be what is wrong.
            is_certain: whether nobody else can have made the mistake.
            may_be_apply: whether it may be in how the step was applied.

        Returns:
            The copies and their pods, for people; empty if none counts as damaged.
        """
        self.differs = True
        is_copy = (self.is_alone or is_certain) and not may_be_apply
        if not (is_copy or self.has_differed):
            return ""
        with self._lock:
            blamed = [read for read in self._read_well if may_be_wrong(read.key)]
        self.bad += [BadSegment(key=r.key, pod=r.holder.pod) for r in blamed]
        silent: set[Holder] = set()
        for read in blamed:
            if read.holder not in silent and not self._client.doubt(read.holder, read.header):
                silent.add(read.holder)  # to ask for each copy would take as long each time
        named = [f"the {read.key} on {read.holder.pod}" for read in blamed[:MAX_NAMED]]
        if blamed[MAX_NAMED:]:
            named.append(count(len(blamed) - MAX_NAMED, "more copy", "more copies"))
        return ", ".join(named)

    def acquit(self, is_proven: Callable[[SegmentKey], bool]) -> None:
        """Never blame the copies of some segments: what was made of them is what votes told."""
        with self._lock:
            self._read_well = [r for r in self._read_well if not is_proven(r.key)]

    def read_unit(
        self,
        units: UnitBytes,
        key: SegmentKey,
        holders: Sequence[Holder],
        why_wrong: Callable[[SegmentKey], str] = lambda _: "",
    ) -> None:
        """Read a unit's segment to where the unit lies; errors are those of :meth:`read`.

        Args:
            units: of the state.
            key: of the segment.
            holders: pods whose copies count.
            why_wrong: returns why a copy that lies in its place is wrong as it was written; empty
                if it is not.
        """
        memory = self.memory(units.size_bytes(key.unit, key.kind))

        def placed() -> str:
            units.read(key.unit, key.kind, memory)
            return why_wrong(key)

        def digest() -> str:
            return seal(key, units.digest(key.unit, key.kind, memory))

        self.read(key, holders, memory, digest, placed)

    def read(
        self,
        key: SegmentKey,
        holders: Sequence[Holder],
        memory: memoryview,
        digest: Callable[[], str],
        why_wrong: Callable[[], str] = lambda: "",
    ) -> None:
        """Read a segment from the first holder whose copy is good, from this pod first.

        A copy here that is not among the holders is not read: it was blamed, or it is a log of an
        attempt that does not count.

        Args:
            key: of the segment.
            holders: pods whose copies count; this one may be among them.
            memory: receives it, of its size.
            digest: returns that of what is in the memory.
            why_wrong: returns why what is there is wrong, though it has its digest; or nothing.

        Raises:
            Unusable: no copy is good, or the quorum has ended.
        """
        left, whys = [holder for holder in holders if holder.pod != self._pod], list[str]()
        own = len(left) < len(holders)
        while not self._ended():
            try:
                read = self._client.fetch(key, left, memory, own=own)
            except (SegmentMissing, StoreGone) as error:
                if isinstance(error, SegmentMissing) and not self._ended():
                    # A store that has told of it finds it no more: its header is damaged.
                    pods = (self._pod if h is None else h.pod for h in error.lacking)
                    self.bad += [BadSegment(key=key, pod=pod) for pod in pods]
                raise Unusable("; ".join([*whys, str(error)])) from error
            pod = self._pod if read.holder is None else read.holder.pod
            why = why_wrong() if digest() == read.header.digest else NOT_AS_WRITTEN
            if not why:
                holder = next(h for h in holders if h.pod == pod)
                with self._lock:
                    self._read_well.append(_Read(key, read.header, holder))
                return
            if read.holder is None:
                own = False
                self._client.discard(key)
            else:
                left.remove(read.holder)
                self._client.doubt(read.holder, read.header)
            whys.append(self._note_damaged(key, pod, why))
        raise Unusable(self._ended())

    def read_awaited(
        self,
        key: SegmentKey,
        nonce: str,
        holder: Holder,
        memory: memoryview,
        digest: Callable[[], str],
    ) -> None:
        """Read a segment that another member of the quorum writes, as soon as it is there.

        Args:
            key: of the segment.
            nonce: of the quorum.
            holder: pod in whose store it appears.
            memory: receives it, of its size.
            digest: returns that of what is in the memory.

        Raises:
            Unusable: it is damaged, its pod is gone, or the quorum has ended.
        """
        try:
            header = self._client.fetch_awaited(key, nonce, holder, memory, self._ended)
        except (SegmentMissing, StoreGone) as error:
            raise Unusable(self._ended() or str(error)) from error
        if digest() != header.digest:
            self._client.doubt(holder, header)
            raise Unusable(self._note_damaged(key, holder.pod))

    def holders_of(self, key: SegmentKey, told: Mapping[SegmentKey, Holders]) -> Holders:
        """Return who keeps the log of a micro-batch.

        Args:
            key: of the log.
            told: of all logs of its step that stores tell of.

        Raises:
            Unusable: no store tells of it. Then stores tell a wrong number of micro-batches of this
                type, and its logs there count as damaged.
        """
        if key in told:
            return told[key]
        first = replace(key, micro_batch=0)
        pods = [holder.pod for holder in told.get(first, ())]
        self.bad += [BadSegment(key=first, pod=pod) for pod in pods]
        raise Unusable(f"{', '.join(pods)} told of the {first}, but not of the {key}")

    def _note_damaged(self, key: SegmentKey, pod: PodUid, why: str = NOT_AS_WRITTEN) -> str:
        self.bad.append(BadSegment(key=key, pod=pod))
        told = f"the copy of {key} on {pod} {why}"
        logger.warning("%s", told)
        return told

    def memory(self, size_bytes: int) -> memoryview:
        """Return memory for a segment, that of the one before if it is large enough."""
        if self._buffer.numel() < size_bytes:
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8)
        return memoryview(self._buffer.numpy())[:size_bytes]  # type: ignore[arg-type]
