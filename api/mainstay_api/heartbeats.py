"""Finds pods that have fallen silent: the replica that holds the lease checks every job.

How long a pod has been silent is counted while others are heard, by the store's
clock: after an outage of the api, of Redis or of the network everybody looks
expired, and nobody is (protocol section 8).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mainstay_api.settings import Settings
from mainstay_api.tasks import end_tasks
from mainstay_api.transactions import Transactions
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.logs import about
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.control_plane.job_store import UnknownJobError
from mainstay_core.control_plane.watch import Watch
from mainstay_core.coordinator.events import Transition

logger = logging.getLogger(__name__)

MAX_LOOKS = 64
"""Jobs that are looked at side by side. A look takes milliseconds; one that waits for a decision
on a busy job takes seconds, and must not keep the others waiting."""
TELL_AGAIN_S = 60.0
"""A job whose looks keep failing is told of in the log so often: it is looked at ten times a
second."""


class HeartbeatWatch:
    """Ticks all jobs while this process holds the lease."""

    def __init__(self, transactions: Transactions, settings: Settings) -> None:
        self._transactions = transactions
        self._settings = settings
        self._holder = secrets.token_hex(8)
        self._watch = Watch(
            lease_s=settings.lease_s,
            idle_s=settings.tick_idle_s,
            hold_lease=lambda: transactions.store.hold_lease(self._holder, settings.lease_s),
            list_uids=transactions.store.list_uids,
            look=self._look,
            begin=self._begin,
            failed=self._failed,
        )
        self._places = asyncio.Semaphore(MAX_LOOKS)
        self._looks: set[asyncio.Task[None]] = set()
        self._told_at_s: dict[JobUid, float] = {}
        """When the log was last told of each job whose newest look has failed."""

    async def run(self) -> None:
        """Tick until cancelled; then give the lease back."""
        try:
            while True:
                try:
                    await self._watch.round(time.monotonic())
                except MainstayError as error:
                    logger.warning("a look at the jobs failed: %s", error)
                except Exception:
                    # Without the watcher no silence is ever noticed again.
                    logger.exception("a look at the jobs failed")
                await asyncio.sleep(self._settings.tick_pending_s)
        finally:
            await end_tasks(*self._looks)
            await self._release()

    async def _look(self, uid: JobUid, silence: HeartbeatLag) -> Transition | None:
        outcome = await self._transactions.look(uid, silence)
        self._told_at_s.pop(uid, None)
        return outcome

    async def _begin(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with self._places:
                await look()

        task = asyncio.create_task(run())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    def _failed(self, uid: JobUid, error: Exception) -> None:
        if isinstance(error, UnknownJobError):
            return  # deleted since the jobs were listed; they are listed anew
        now_s = time.monotonic()
        if now_s - self._told_at_s.get(uid, -TELL_AGAIN_S) < TELL_AGAIN_S:
            return
        if len(self._told_at_s) >= 10 * MAX_LOOKS:
            self._told_at_s.clear()  # of jobs that are no more
        self._told_at_s[uid] = now_s
        trace = None if isinstance(error, MainstayError) else error
        logger.warning("a look failed: %s", error, exc_info=trace, extra=about(uid=uid))

    async def _release(self) -> None:
        try:
            await self._transactions.store.release_lease(self._holder)
        except MainstayError as error:
            logger.info("the lease runs out by itself: %s", error)
