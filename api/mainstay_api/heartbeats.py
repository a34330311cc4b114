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

from mainstay_api.settings import Settings
from mainstay_api.transactions import Transactions
from mainstay_core.base.errors import MainstayError
from mainstay_core.coordinator.watch import Watch

logger = logging.getLogger(__name__)


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
            look=transactions.look,
        )

    async def run(self) -> None:
        """Tick until cancelled; then give the lease back."""
        try:
            while True:
                try:
                    await self._watch.round(time.monotonic())
                except MainstayError as error:
                    logger.warning("a look at the jobs failed: %s", error)
                except Exception:
                    # The watcher must outlive any one job's trouble: without it
                    # no silence is ever noticed again.
                    logger.exception("a look at the jobs failed")
                await asyncio.sleep(self._settings.tick_pending_s)
        finally:
            await self._release()

    async def _release(self) -> None:
        try:
            await self._transactions.store.release_lease(self._holder)
        except MainstayError as error:
            logger.info("the lease runs out by itself: %s", error)
