"""Hands a job's stream to all who listen at one replica of the api.

A listener gets the newest plan, then what it has missed since the entry that it names, and then
every entry as it comes, each once. One reader of the store serves all listeners of a replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from mainstay_core.control_plane.job_store import PUSHED, StoreUnavailableError
from mainstay_core.job.phase import TERMINAL

BLOCK_S = 5.0
"""One blocking read; nothing depends on its length."""
RETRY_S = 0.2
"""After the store was not reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamItem:
    """One entry of a job's stream, as a store keeps it."""

    id: str
    """Position, two numbers as Redis gives them: ``time-number``; empty where it is no entry."""
    kind: str
    """As in :data:`mainstay_core.control_plane.job_store.STREAM_KINDS`."""
    data: Any
    """What it tells, in the store's form."""


class StreamStore(Protocol):
    """A store of one job, as far as its stream is concerned.

    Every method may raise StoreUnavailableError.
    """

    async def fetch_plan(self) -> tuple[Any, str, str]:
        """Return (plan or None, stream position at which it is current, phase)."""

    async def read_stream(self, after: str, block_s: float | None) -> Sequence[StreamItem]:
        """Return the entries after a position.

        Args:
            after: the position.
            block_s: how long to wait for the first one, about; None does not wait.
        """


class Listener(Protocol):
    """One who listens; what is put there is taken in the same order."""

    def put(self, item: StreamItem) -> None: ...

    async def take(self) -> StreamItem | None:
        """Wait for the next item; None: it was cut off, or has left."""


ListenerT = TypeVar("ListenerT", bound=Listener)


class JobStream(ABC, Generic[ListenerT]):
    """One job's stream, without a transport.

    Args:
        store: has the job.
    """

    def __init__(self, store: StreamStore) -> None:
        self._store = store
        self.listeners: dict[ListenerT, None] = {}
        """In the order in which they came."""
        self._read_from = "0-0"
        """Where the reader began: what came before it gives to nobody."""

    @abstractmethod
    def start_reader(self, cursor: str) -> bool:
        """Run :meth:`read` from ``cursor`` in the background; False if it runs already."""

    @abstractmethod
    def tell_end(self, phase: str) -> Any:
        """Return what an entry of kind ``stop`` tells in the store's form."""

    @abstractmethod
    async def pause(self, delay_s: float, why: str) -> None:
        """Let time pass after a failure."""

    async def follow(
        self, listener: ListenerT, last_id: str | None
    ) -> AsyncGenerator[StreamItem, None]:
        """Yield what the listener is to get, until it is cut off or leaves.

        Args:
            listener: it is taken off :attr:`listeners` by the shell.
            last_id: id of the last entry that it has seen.

        Raises:
            StoreUnavailableError: the store was not reached at the beginning.
        """
        # First of all: what is put there from now on is not missed, and comes after the rest.
        self.listeners[listener] = None
        plan, cursor, phase = await self._store.fetch_plan()
        if self.start_reader(cursor):
            self._read_from = cursor
        if plan is not None:
            yield StreamItem(id=cursor if last_id is None else "", kind="plan", data=plan)
        # A listener whose answer overtook this one's may have had the reader begin further on.
        upto = max(cursor, self._read_from, key=order)
        async for item in self._missed(cursor if last_id is None else last_id, upto):
            yield item
        if phase in TERMINAL:
            yield StreamItem(id="", kind="stop", data=self.tell_end(phase))
        while (came := await listener.take()) is not None:
            if not came.id or order(came.id) > order(upto):
                yield came

    async def _missed(self, after: str, upto: str) -> AsyncGenerator[StreamItem, None]:
        while order(after) < order(upto):
            items = await self._store.read_stream(after, None)
            for item in items:
                if order(item.id) > order(upto):
                    return
                if item.kind in PUSHED:
                    yield item
            if not items:
                return
            after = items[-1].id

    async def read(self, cursor: str) -> None:
        """Give entries after ``cursor`` to all listeners, for ever."""
        while True:
            try:
                items = await self._store.read_stream(cursor, BLOCK_S)
            except StoreUnavailableError as error:
                await self.pause(RETRY_S, f"the stream is interrupted: {error}")
                continue
            for item in items:
                cursor = item.id
                if item.kind in PUSHED:
                    for listener in tuple(self.listeners):
                        listener.put(item)


def order(entry: str) -> tuple[int, int]:
    """Return a sort key of an entry's id."""
    time, _, number = entry.partition("-")
    return int(time), int(number or 0)
