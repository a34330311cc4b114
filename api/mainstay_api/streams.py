"""Live streams of jobs as server-sent events.

A plan must reach every supervisor within milliseconds of being stored, and
thousands of supervisors must not mean thousands of blocking reads of the store:
one reader per job and process hands the stream to all who listen here
(:mod:`mainstay_core.control_plane.stream`). A listener whose queue is full is cut off: it comes
back with the id of the last entry it has seen and gets the rest from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from mainstay_api.store_protocol import JobStore, Store
from mainstay_api.tasks import end_tasks
from mainstay_core.base.ids import JobUid
from mainstay_core.base.logs import about
from mainstay_core.control_plane.job_store import StoreUnavailableError
from mainstay_core.control_plane.stream import JobStream, StreamItem

logger = logging.getLogger(__name__)

LINGER_S = 5.0
"""A job's reader goes on for so long without a listener. Its end ends a connection to the store:
whoever opens and closes streams would have one made, and the store identified, each time."""
MAX_QUEUED = 1000
MAX_PER_JOB = 65_536
"""Streams of one job at a time: one for each pod of the largest jobs, four times over."""
ALIVE = StreamItem(id="", kind="", data="")
"""Nothing to tell: the connection is kept open."""


class Streams:
    """The live streams of this process.

    Args:
        store: of all jobs.
        keep_alive_s: after so long without an entry a comment is sent.
        check_s: after so long it is asked again whether a listener may still listen.
        per_pod: streams of one pod at a time. The oldest ends for the newest: a pod that comes
            back cannot know that the stream that it has lost still stands here.
        linger_s: for so long a job's reader goes on without a listener.
    """

    def __init__(
        self,
        store: Store,
        keep_alive_s: float,
        check_s: float = 30.0,
        per_pod: int = 4,
        linger_s: float = LINGER_S,
    ) -> None:
        self._store = store
        self._keep_alive_s, self._check_s = keep_alive_s, check_s
        self._per_pod, self._linger_s = per_pod, linger_s
        self._jobs: dict[JobUid, _JobStream] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    async def listen(
        self,
        uid: JobUid,
        last_id: str | None,
        pod: str = "",
        may_still: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncIterator[str]:
        """Yield the job's stream as server-sent events: the current plan, then what comes.

        Args:
            uid: the job.
            last_id: id of the last entry that the listener has seen; what it
                missed comes before anything new.
            pod: that listens.
            may_still: asked now and then; the stream ends when it returns False.
        """
        job = self._jobs.setdefault(uid, _JobStream(JobStore(self._store, uid), uid))
        listener = _Queue(self._keep_alive_s, pod)
        if self._closed:
            listener.cut()
        self._make_room(job, pod)
        check_at_s = time.monotonic() + self._check_s
        try:
            async with aclosing(job.follow(listener, last_id)) as items:
                async for item in items:
                    if may_still is not None and time.monotonic() >= check_at_s:
                        if not await may_still():
                            return
                        check_at_s = time.monotonic() + self._check_s
                    yield _event(item)
        except StoreUnavailableError as error:
            # The answer has begun: its end tells the listener to come back.
            logger.warning("a listener is sent away: %s", error, extra=about(uid=uid))
        finally:
            self._leave(uid, job, listener)

    def has_room(self, uid: JobUid, pod: str) -> bool:
        """Return whether a pod may open another stream.

        One that was cut ends when its listener takes what is on its way: who opens streams and
        reads none of them gets no more.
        """
        job = self._jobs.get(uid)
        open_here = sum(each.pod == pod for each in job.listeners) if job is not None else 0
        return open_here < 4 * self._per_pod

    def _make_room(self, job: _JobStream, pod: str) -> None:
        """End the oldest streams of a pod, and of the job, for one more."""
        listening = [each for each in job.listeners if not each.is_cut]
        of_pod = [each for each in listening if each.pod == pod]
        too_many = of_pod[: max(0, len(of_pod) + 1 - self._per_pod)]
        too_many += listening[: max(0, len(listening) + 1 - MAX_PER_JOB)]
        for each in too_many:
            each.cut()

    def close(self) -> None:
        """End all streams at once: the process is about to stop."""
        self._closed = True
        for job in self._jobs.values():
            for listener in tuple(job.listeners):
                listener.cut()

    async def aclose(self) -> None:
        """Stop reading."""
        self.close()
        for job in self._jobs.values():
            if job.ends is not None:
                job.ends.cancel()
        await end_tasks(*(job.reader for job in self._jobs.values() if job.reader is not None))
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def _leave(self, uid: JobUid, job: _JobStream, listener: _Queue) -> None:
        job.listeners.pop(listener, None)
        if not job.listeners and job.ends is None and not self._closed:
            loop = asyncio.get_running_loop()
            job.ends = loop.call_later(self._linger_s, self._end_unheard, uid, job)

    def _end_unheard(self, uid: JobUid, job: _JobStream) -> None:
        """End a job's reader if nobody listens."""
        job.ends = None
        if job.listeners:
            return
        del self._jobs[uid]
        if job.reader is not None:
            ending = asyncio.create_task(end_tasks(job.reader))
            self._leaving.add(ending)
            ending.add_done_callback(self._leaving.discard)


class _JobStream(JobStream["_Queue"]):
    """One job's stream, with its reader.

    Args:
        store: the job's part of it.
        uid: the job.
    """

    def __init__(self, store: JobStore, uid: JobUid) -> None:
        super().__init__(store)
        self._uid = uid
        self.reader: asyncio.Task[None] | None = None
        self.ends: asyncio.TimerHandle | None = None
        """When it is looked whether anybody listens; None while that is not planned."""

    def start_reader(self, cursor: str) -> bool:
        if self.reader is not None and not self.reader.done():
            return False
        self.reader = asyncio.create_task(self.read(cursor))
        return True

    def tell_end(self, phase: str) -> str:
        return json.dumps({"state": phase, "reason": ""})

    async def pause(self, delay_s: float, why: str) -> None:
        logger.warning("%s", why, extra=about(uid=self._uid))
        await asyncio.sleep(delay_s)


class _Queue:
    """A listener's queue, of bounded length.

    Args:
        keep_alive_s: after so long without an entry there is something to send all the same.
        pod: that listens.
    """

    def __init__(self, keep_alive_s: float, pod: str) -> None:
        self.pod, self.is_cut = pod, False
        self._keep_alive_s = keep_alive_s
        self._items: asyncio.Queue[StreamItem | None] = asyncio.Queue(MAX_QUEUED)

    def put(self, item: StreamItem) -> None:
        try:
            self._items.put_nowait(item)
        except asyncio.QueueFull:
            self.cut()

    async def take(self) -> StreamItem | None:
        try:
            async with asyncio.timeout(self._keep_alive_s):
                return await self._items.get()
        except TimeoutError:
            return ALIVE

    def cut(self) -> None:
        """Make the listener's next look at its queue the last one."""
        self.is_cut = True
        while True:
            with contextlib.suppress(asyncio.QueueFull):
                self._items.put_nowait(None)
                return
            self._items.get_nowait()


def _event(item: StreamItem) -> str:
    if item is ALIVE:
        return ": alive\n\n"
    identity = f"id: {item.id}\n" if item.id else ""
    return f"{identity}event: {item.kind}\ndata: {item.data}\n\n"
