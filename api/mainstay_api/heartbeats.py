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
from mainstay_core.base.ids import JobUid, PodUid
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Tick
from mainstay_core.coordinator.heartbeats import HeartbeatLag
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.coordinator.store_recovery import is_behind

logger = logging.getLogger(__name__)


class HeartbeatWatch:
    """Ticks all jobs while this process holds the lease."""

    def __init__(self, transactions: Transactions, settings: Settings) -> None:
        self._transactions = transactions
        self._settings = settings
        self._holder = secrets.token_hex(8)
        self._lags: dict[JobUid, HeartbeatLag] = {}
        self._next_tick: dict[JobUid, float] = {}
        self._ended: set[JobUid] = set()
        self._renew_at = 0.0

    async def run(self) -> None:
        """Tick until cancelled; then give the lease back."""
        try:
            while True:
                try:
                    await self._round()
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

    async def _round(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            if not await self._transactions.store.hold_lease(self._holder, self._settings.lease_s):
                self._lags.clear()
                return
            self._renew_at = now + self._settings.lease_s / 3
        for uid in await self._transactions.store.list_uids():
            if uid not in self._ended and now >= self._next_tick.get(uid, 0.0):
                await self._look(uid, now)

    async def _look(self, uid: JobUid, now: float) -> None:
        state = await self._transactions.load(uid)
        if state.terminal:
            self._ended.add(uid)
            self._lags.pop(uid, None)
            return
        seen = await self._transactions.store.fetch_seen(uid)
        lag = self._lags.setdefault(uid, HeartbeatLag())
        behind = lag.update(seen, state.config.heartbeat_s)
        heard = await self._heard(uid, state, lag.heard)
        outcome = await self._transactions.apply(uid, Tick(behind_s=behind, heard=heard))
        pending = machine.is_pending(outcome.state)
        self._next_tick[uid] = now + (0.0 if pending else self._settings.tick_idle_s)

    async def _heard(
        self, uid: JobUid, state: CoordinatorState, pods: set[PodUid]
    ) -> tuple[PodUid, ...]:
        """Return those of the pods waited for that spoke and hold nothing unknown to the store."""
        wanted = pods.intersection(state.unheard)
        if not wanted:
            return ()
        beats = await self._transactions.store.fetch_beats(uid)
        return tuple(
            sorted(p for p in wanted if p in beats and not is_behind(state, beats[p].quorum))
        )
