"""Decides which jobs a replica of the api checks for silence, and when.

Only the replica that holds the lease looks: silence is counted from one look to the next, and
two that count would each believe the other's gaps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from mainstay_core.base.ids import JobUid
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Transition
from mainstay_core.coordinator.heartbeats import HeartbeatLag


class Watch:
    """One replica's looks at all jobs.

    Args:
        lease_s: how long the lease lasts; it is renewed after a third of that.
        idle_s: seconds between two looks at a job for which nothing is pending.
        hold_lease: takes or renews the lease; False while another replica has it.
        list_uids: returns the jobs.
        look: looks at one job; None once it has ended.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        idle_s: float,
        hold_lease: Callable[[], Awaitable[bool]],
        list_uids: Callable[[], Awaitable[Iterable[JobUid]]],
        look: Callable[[JobUid, HeartbeatLag], Awaitable[Transition | None]],
    ) -> None:
        self._lease_s, self._idle_s = lease_s, idle_s
        self._hold_lease, self._list_uids, self._look = hold_lease, list_uids, look
        self._silences: dict[JobUid, HeartbeatLag] = {}
        self._next_look_s: dict[JobUid, float] = {}
        self._ended: set[JobUid] = set()
        self._renew_at_s = 0.0

    async def round(self, now_s: float) -> None:
        """Look at every job that is due, if the lease is held.

        Args:
            now_s: a clock that never jumps.
        """
        if now_s >= self._renew_at_s:
            if not await self._hold_lease():
                self._silences.clear()
                return
            self._renew_at_s = now_s + self._lease_s / 3
        for uid in await self._list_uids():
            if uid not in self._ended and now_s >= self._next_look_s.get(uid, 0.0):
                await self._look_at(uid, now_s)

    async def _look_at(self, uid: JobUid, now_s: float) -> None:
        outcome = await self._look(uid, self._silences.setdefault(uid, HeartbeatLag()))
        if outcome is None:
            self._ended.add(uid)
            self._silences.pop(uid, None)
            return
        pending = machine.is_pending(outcome.state)
        self._next_look_s[uid] = now_s + (0.0 if pending else self._idle_s)
