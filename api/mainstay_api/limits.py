"""Bounds what each job and each caller asks of this process, so that no tenant is in another's way.

Requests and bytes come out of buckets (:mod:`mainstay_core.base.allowance`): one of each pod, one
of all pods of a job, which is larger the more pods have registered, one of each person, and one of
all people who read a job. Entries of the ledger, findings of checks, and what is held for a store
that has lost the job, have buckets of their own: whatever these cost, facts and heartbeats come
through. The provider (the operator, local mode) is not bounded: it is what ends a job that asks too
much.

Every process counts for itself, so a replicated api allows as many times as much.
"""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mainstay_api.auth import Caller
from mainstay_api.problems import ProblemError
from mainstay_api.settings import Settings
from mainstay_core.base.allowance import Allowances, Rate

BURST_S = 10.0
"""What may be asked for at once: as much as comes in this time. An api that was away is called by
everybody at once when it is back."""
REQUESTS_PER_POD = 4.0
"""What each registered pod adds to its job's requests per second: a heartbeat and a batch of facts
or ledger entries each second, twice over."""
BYTES_PER_POD = 64 * 1024
"""What each registered pod adds to its job's bytes per second: twenty heartbeats of 8 slots, or a
hundred ledger entries."""
READERS = 5
"""People who read one job, as many times what one person may."""
LONG_ANSWERS = {
    "report": 10.0,
    "events": 5.0,
    "jobs": 5.0,
    "ledger": 5.0,
    "recoveries": 5.0,
    "findings": 5.0,
    "members": 2.0,
}
"""By the end of a route's path: answers that grow with a job's history or size, or with the number
of jobs, count as so many."""
HOLD_S = 1.0
"""A supervisor's request that is one too many is answered after this: who does not wait then asks
no faster than it is answered, and each refusal costs half of what an answer does."""
MAX_HELD = 64
"""Answers that are held back at a time for one job; each has a connection."""
DEAR = {"facts": 3.0, "stream": 4.0, "pods": 2.0}
"""By the end of a route's path: a supervisor's request counts as so many heartbeats, as its cost to
this process is. Facts are decided about and stored; a stream reads the store for itself."""
WEIGHED_BYTES = {"ledger": 512, "findings": 512}
"""By the end of a route's path: a request with several entries of the ledger, or findings, counts
as one for each of them, about."""
ADDED_BYTES = {"facts": 4096}
"""Likewise: facts that come together are decided about together, but reading so many bytes, some
twenty facts, takes as long as a heartbeat does."""
OWN_BUCKETS = ("ledger", "findings", "restore")
"""Routes of supervisors that take nothing from the share of facts and heartbeats."""
AT_ONCE_OF_JOB = 4
"""Requests of a job's pods that are answered at a time, and one more for each registered pod. The
job's others wait in line; its heartbeats have one of their own, as long. Other jobs and people do
not wait for them."""
EAGER = 0.5
"""Pods that have used up more than this share of what they may ask for at once are eager: they have
asked for more than what comes in each second, for seconds."""
AT_ONCE_OF_EAGER = 1
"""Their requests that are answered at a time, and one more for each :data:`PODS_OF_EAGER` pods of
the job. Each lets others' requests go first."""
PODS_OF_EAGER = 8
KEEP_ALIVE_S = 75
"""A connection without requests is closed after this: later than a proxy in between gives it up."""
MAX_CONNECTIONS = 32
"""Connections that one caller keeps between requests. Our clients keep a few."""
MAX_OWNERS = 16_384
"""Callers whose connections are known at a time: as many as the pods of the largest jobs."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as far as it is counted."""

    caller: Caller
    job: str
    """Uid of the job, or what the path calls it if it is not known; empty: it names none."""
    pod: str
    """For which a supervisor's request speaks; empty if it says none."""
    route: str
    """End of the route's path, e.g. ``facts``."""
    by_agent: bool
    num_bytes: int
    """Announced length of the body."""
    num_pods: int
    """Pods of the job that have registered."""
    connection: tuple[str, int]


class TooManyError(ProblemError):
    """More was asked than is allowed in the time.

    Args:
        whose: allowance that is used up, for people.
        wait_s: until there is some of it again.
    """

    def __init__(self, whose: str, wait_s: float) -> None:
        seconds = max(1, math.ceil(wait_s))
        super().__init__(
            429,
            "too-many",
            f"{whose} have asked for more than their share of this api",
            f"ask again in {seconds} s; MAINSTAY_POD_REQUESTS_PER_S and its like "
            "(values api.limits.*) are the shares",
            retry_after_s=seconds,
        )
        self.wait_s, self.retry_after_s = wait_s, seconds


class Limits:
    """Counts what was asked of this process, and by whom.

    Args:
        settings: the rates.
        clock: monotonic, in seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._buckets: Allowances[Hashable] = Allowances()
        self._held: collections.Counter[str] = collections.Counter()
        self._connections: collections.OrderedDict[Hashable, dict[tuple[str, int], float]]
        self._connections = collections.OrderedDict()

    def take(self, asked: Asked) -> None:
        """Count a request.

        Raises:
            TooManyError: it is one too many.
        """
        if asked.caller.is_provider and not asked.by_agent:
            return
        wanted = self._of_agent(asked) if asked.by_agent else self._of_person(asked)
        wait_s, lacking = self._buckets.take(wanted, self._clock())
        if lacking is not None:
            raise TooManyError(_name_of(asked, lacking), wait_s)

    def is_eager(self, asked: Asked) -> bool:
        """Return whether a supervisor's request is one of many: its pod's, or all of its job's."""
        now_s = self._clock()
        return any(
            self._buckets.level(key, rate, now_s) < (1 - EAGER) * rate.burst
            for key, (rate, _amount) in self._of_agent(asked).items()
        )

    def may_keep(self, asked: Asked) -> bool:
        """Return whether the connection may stay open for the caller's next request."""
        if asked.caller.is_provider and not asked.by_agent:
            return True
        now_s, owner = self._clock(), _owner_of(asked)
        kept = self._connections.setdefault(owner, {})
        self._connections.move_to_end(owner)
        while len(self._connections) > MAX_OWNERS:
            self._connections.popitem(last=False)
        known = kept.pop(asked.connection, None) is not None
        if not known and len(kept) >= MAX_CONNECTIONS:
            # In the order of their last requests.
            for connection, at_s in tuple(kept.items()):
                if now_s - at_s < KEEP_ALIVE_S:
                    break
                del kept[connection]
            if len(kept) >= MAX_CONNECTIONS:
                return False
        kept[asked.connection] = now_s
        return True

    async def hold(self, asked: Asked, refusal: TooManyError) -> None:
        """Hold the answer to a supervisor's request back, unless many are held already."""
        # People come through the API server, all from one address: theirs would be used up.
        if not asked.by_agent or self._held[asked.job] >= MAX_HELD:
            return
        self._held[asked.job] += 1
        try:
            await asyncio.sleep(min(HOLD_S, refusal.retry_after_s))
        finally:
            self._held[asked.job] -= 1
            if not self._held[asked.job]:
                del self._held[asked.job]

    def _of_agent(self, asked: Asked) -> dict[Hashable, tuple[Rate, float]]:
        settings, weight = self._settings, weight_of(asked)
        kind = asked.route if asked.route in OWN_BUCKETS else "other"
        of_job = settings.job_requests_per_s + REQUESTS_PER_POD * asked.num_pods
        num_bytes = settings.job_mib_per_s * MIB + BYTES_PER_POD * asked.num_pods
        return {
            ("pod", asked.job, asked.pod, kind): (_rate(settings.pod_requests_per_s), weight),
            ("job", asked.job, kind): (_rate(of_job), weight),
            ("bytes", asked.job, kind): (_rate(num_bytes), float(asked.num_bytes)),
        }

    def _of_person(self, asked: Asked) -> dict[Hashable, tuple[Rate, float]]:
        settings, weight = self._settings, LONG_ANSWERS.get(asked.route, 1.0)
        person, rate = person_of(asked.caller.username), settings.person_requests_per_s
        wanted: dict[Hashable, tuple[Rate, float]] = {
            ("person", person): (_rate(rate), weight),
            ("bytes", person): (_rate(settings.job_mib_per_s * MIB), float(asked.num_bytes)),
        }
        if asked.job:
            wanted["readers", asked.job] = (_rate(READERS * rate), weight)
        return wanted


def weight_of(asked: Asked) -> float:
    """Return as how many heartbeats a supervisor's request counts."""
    weight = DEAR.get(asked.route, 1.0)
    if asked.route in WEIGHED_BYTES:
        weight = max(weight, asked.num_bytes / WEIGHED_BYTES[asked.route])
    if asked.route in ADDED_BYTES:
        weight += asked.num_bytes // ADDED_BYTES[asked.route]
    return weight


def person_of(username: str) -> str:
    """Return whom a name belongs to: all ServiceAccounts of a namespace are one's.

    Whoever may make one may make thousands.
    """
    if username.startswith("system:serviceaccount:"):
        return username.rpartition(":")[0]
    return username


def _owner_of(asked: Asked) -> Hashable:
    if asked.by_agent:
        return ("pod", asked.job, asked.pod)
    return ("person", person_of(asked.caller.username))


def _rate(per_s: float) -> Rate:
    return Rate(per_s=per_s, burst=max(1.0, BURST_S * per_s))


def _name_of(asked: Asked, lacking: Hashable) -> str:
    """Return whose share is used up, for people."""
    kind = lacking[0] if isinstance(lacking, tuple) else ""
    if kind == "pod":
        return f"the requests of pod {asked.pod or 'without a name'}"
    if kind == "bytes":
        return "the bodies of " + (f"job {asked.job}" if asked.by_agent else "your requests")
    if kind == "readers":
        return f"all who read job {asked.job}"
    return f"the pods of job {asked.job}" if asked.by_agent else "your requests"
