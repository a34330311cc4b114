"""Decides which jobs a replica of the api checks for silence, and when.

Only the replica that holds the lease looks: silence is counted from one look to the next, and
two that count would each believe the other's gaps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from mainstay_core.base.ids import JobUid
from mainstay_core.control_plane.heartbeats import HeartbeatLag
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import Transition


class Watch:
    """One replica's looks at all jobs. No job's look waits for another one's, or fails with it.

    Args:
        lease_s: how long the lease lasts; it is renewed after a third of that.
        idle_s: seconds between two looks at a job for which nothing is pending, and between two
            looks at which jobs there are: a store is asked little in each round.
        hold_lease: takes or renews the lease; False while another replica has it.
        list_uids: returns the jobs.
        look: looks at one job; None once it has ended.
        begin: runs the look at one job, beside those at others if there are others.
        failed: is told which job's look has failed, and how. That job is looked at again in the
            next round.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        idle_s: float,
        hold_lease: Callable[[], Awaitable[bool]],
        list_uids: Callable[[], Awaitable[Iterable[JobUid]]],
        look: Callable[[JobUid, HeartbeatLag], Awaitable[Transition | None]],
        begin: Callable[[Callable[[], Coroutine[Any, Any, None]]], Awaitable[None]],
        failed: Callable[[JobUid, Exception], None],
    ) -> None:
        self._lease_s, self._idle_s = lease_s, idle_s
        self._hold_lease, self._list_uids, self._look = hold_lease, list_uids, look
        self._begin, self._failed = begin, failed
        self._under_way: set[JobUid] = set()
        self._silences: dict[JobUid, HeartbeatLag] = {}
        self._next_look_s: dict[JobUid, float] = {}
        self._ended: set[JobUid] = set()
        self._renew_at_s = 0.0
        self._uids: tuple[JobUid, ...] = ()
        """The jobs that there were, newly listed at the time below."""
        self._list_at_s = 0.0

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
        if now_s >= self._list_at_s:
            self._uids = tuple(await self._list_uids())
            self._list_at_s = now_s + self._idle_s
            self._forget_all_but(frozenset(self._uids))
        for uid in self._uids:
            due = now_s >= self._next_look_s.get(uid, 0.0)
            if due and uid not in self._ended and uid not in self._under_way:
                self._under_way.add(uid)
                await self._begin(partial(self._look_at, uid, now_s))

    def _forget_all_but(self, uids: frozenset[JobUid]) -> None:
        """Keep nothing of jobs that are no more: they come and go for as long as this runs."""
        self._ended &= uids
        for known in (self._silences, self._next_look_s):
            for uid in known.keys() - uids:
                del known[uid]

    async def _look_at(self, uid: JobUid, now_s: float) -> None:
        try:
            outcome = await self._look(uid, self._silences.setdefault(uid, HeartbeatLag()))
        except Exception as error:  # whatever it is, it is this job's and no other's
            self._list_at_s = 0.0  # it may be no more
            self._failed(uid, error)
            return
        finally:
            self._under_way.discard(uid)
        if outcome is None:
            self._ended.add(uid)
            self._silences.pop(uid, None)
            return
        pending = machine.is_pending(outcome.state)
        self._next_look_s[uid] = now_s + (0.0 if pending else self._idle_s)
