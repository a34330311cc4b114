"""One reader per job and process hands the job's stream to all who listen here.

A plan must reach every supervisor within milliseconds of being durable, and
thousands of supervisors must not mean thousands of blocking reads of the store.
A listener whose queue is full is cut off: it comes back with the id of the last
entry it has seen and gets the rest from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from mainstay_api.store_protocol import Store, StreamItem
from mainstay_api.tasks import end_tasks
from mainstay_core.base.ids import JobUid
from mainstay_core.coordinator.job_store import PUSHED, StoreUnavailableError
from mainstay_core.job.phase import TERMINAL

logger = logging.getLogger(__name__)

BLOCK_S = 5.0
"""One blocking read; nothing depends on its length."""
RETRY_S = 0.2
"""After the store was not reached."""
MAX_QUEUED = 1000


class Streams:
    """All live streams of this process."""

    def __init__(self, store: Store, keep_alive_s: float) -> None:
        self._store = store
        self._keep_alive_s = keep_alive_s
        self._listeners: dict[JobUid, set[asyncio.Queue[StreamItem | None]]] = {}
        self._readers: dict[JobUid, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    async def listen(self, uid: JobUid, last_id: str | None) -> AsyncIterator[str]:
        """Yield the job's stream as server-sent events: the current plan, then what comes.

        Args:
            uid: the job.
            last_id: id of the last entry that the listener has seen; what it
                missed comes before anything new.
        """
        queue: asyncio.Queue[StreamItem | None] = asyncio.Queue(MAX_QUEUED)
        self._listeners.setdefault(uid, set()).add(queue)
        try:
            async for text in self._follow(uid, last_id, queue):
                yield text
        except StoreUnavailableError as error:
            # The answer has begun: its end tells the listener to come back.
            logger.warning("a listener of %s is sent away: %s", uid, error)
        finally:
            self._leave(uid, queue)

    async def _follow(
        self, uid: JobUid, last_id: str | None, queue: asyncio.Queue[StreamItem | None]
    ) -> AsyncIterator[str]:
        plan, cursor, phase = await self._store.fetch_plan(uid)
        self._start_reader(uid, cursor)
        if plan is not None:
            yield _event("plan", plan, cursor if last_id is None else None)
        async for item in self._missed(uid, last_id, cursor):
            yield _event(item.kind, item.data, item.id)
        if phase in TERMINAL:
            yield _event("stop", f'{{"state":"{phase}","reason":""}}', None)
        async for text in self._live(queue, cursor):
            yield text

    def close(self) -> None:
        """End all streams at once: the process is about to stop."""
        self._closed.set()
        for queues in self._listeners.values():
            for queue in queues:
                _cut(queue)

    async def aclose(self) -> None:
        """Stop reading."""
        self.close()
        await end_tasks(*self._readers.values())
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _missed(
        self, uid: JobUid, last_id: str | None, cursor: str
    ) -> AsyncIterator[StreamItem]:
        after = last_id
        while after is not None:
            items = await self._store.read_stream(uid, after, None)
            for item in items:
                if _order(item.id) > _order(cursor):
                    return
                if item.kind in PUSHED:
                    yield item
            after = items[-1].id if items else None

    async def _live(
        self, queue: asyncio.Queue[StreamItem | None], cursor: str
    ) -> AsyncIterator[str]:
        while not self._closed.is_set():
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    item = await queue.get()
            except TimeoutError:
                yield ": alive\n\n"
                continue
            if item is None:
                return
            if _order(item.id) > _order(cursor):
                yield _event(item.kind, item.data, item.id)

    def _start_reader(self, uid: JobUid, cursor: str) -> None:
        reader = self._readers.get(uid)
        if reader is None or reader.done():
            self._readers[uid] = asyncio.create_task(self._read(uid, cursor))

    async def _read(self, uid: JobUid, cursor: str) -> None:
        while True:
            try:
                items = await self._store.read_stream(uid, cursor, BLOCK_S)
            except StoreUnavailableError as error:
                logger.warning("the stream of %s is interrupted: %s", uid, error)
                await asyncio.sleep(RETRY_S)
                continue
            for item in items:
                cursor = item.id
                if item.kind in PUSHED:
                    for queue in self._listeners.get(uid, ()):
                        _put(queue, item)

    def _leave(self, uid: JobUid, queue: asyncio.Queue[StreamItem | None]) -> None:
        listeners = self._listeners.get(uid, set())
        listeners.discard(queue)
        if not listeners:
            self._listeners.pop(uid, None)
            reader = self._readers.pop(uid, None)
            if reader is not None:
                # Not awaited here: the listener may itself be in the middle of its end.
                ending = asyncio.create_task(end_tasks(reader))
                self._leaving.add(ending)
                ending.add_done_callback(self._leaving.discard)


def _put(queue: asyncio.Queue[StreamItem | None], item: StreamItem) -> None:
    try:
        queue.put_nowait(item)
    except asyncio.QueueFull:
        _cut(queue)


def _cut(queue: asyncio.Queue[StreamItem | None]) -> None:
    """Make the listener's next look at its queue the last one."""
    while True:
        with contextlib.suppress(asyncio.QueueFull):
            queue.put_nowait(None)
            return
        queue.get_nowait()


def _order(entry: str) -> tuple[int, int]:
    """Return a sort key of a Redis stream id."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


def _event(kind: str, data: str, entry: str | None) -> str:
    identity = f"id: {entry}\n" if entry else ""
    return f"{identity}event: {kind}\ndata: {data}\n\n"
