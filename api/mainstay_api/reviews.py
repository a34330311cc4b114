"""The API server's answers, kept for a short while and asked for once at a time.

A supervisor asks every second or so, with the same token: one review a request
would make the API server the bottleneck. An answer is used again for
``fresh_s``; a token that was revoked, or whose pod is deleted, is refused that much
later at most. While the API server does not answer, an answer that it gave is
used for ``stale_s`` where the caller allows it: its outage must not keep
survivors from the plan that they wait for. Refusals are kept for ``refused_s``, in a table of
their own and asked for in a few places of their own: whoever sends ever new tokens takes neither
an answer nor a connection from those who are known.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mainstay_api.kube import KubeUnavailableError

logger = logging.getLogger(__name__)

V = TypeVar("V")

MAX_ANSWERS = 65_536
MAX_REFUSALS = 4_096
"""Refusals that are remembered, about 500 bytes each. The oldest goes first."""
MAX_UNKNOWN = 8
"""Questions at a time about what was never accepted, of the client's connections: the others are
for the answers that run out."""
RETRY_S = 2.0
"""After a question without answer, an old answer is used for so long before the next."""


@dataclass(slots=True)
class _Answer(Generic[V]):
    value: V
    at_s: float
    fresh_until_s: float


class Reviews(Generic[V]):
    """The API server's answers, each used for a limited time.

    Args:
        fresh_s: how long an answer is used without asking again.
        stale_s: how long after it was given at most, while the API server is away.
        refused_s: how long a refusal is used.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        fresh_s: float,
        stale_s: float = 0.0,
        refused_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._refused_s = refused_s
        self._clock = clock
        self._answers: collections.OrderedDict[Hashable, _Answer[V]] = collections.OrderedDict()
        self._refusals: collections.OrderedDict[Hashable, _Answer[V]] = collections.OrderedDict()
        self._places = asyncio.Semaphore(MAX_UNKNOWN)
        self._asking: dict[Hashable, asyncio.Future[V]] = {}

    async def ask(
        self,
        key: Hashable,
        question: Callable[[], Awaitable[V]],
        accepted: Callable[[V], bool],
    ) -> V:
        """Return the answer, asking only when none is kept and nobody is asking already.

        Raises:
            KubeUnavailableError: there is no answer, not even an old one.
        """
        kept = self._answers.get(key)
        if kept is not None and self._clock() < kept.fresh_until_s:
            self._answers.move_to_end(key)
            return kept.value
        refused = self._refusals.get(key)
        if refused is not None and self._clock() < refused.fresh_until_s:
            return refused.value
        asking = self._asking.get(key)
        if asking is None:
            asking = asyncio.ensure_future(self._ask(key, question, accepted))
            self._asking[key] = asking
            asking.add_done_callback(lambda done: self._drop(key, done))
        # One caller's disconnection must not end the question of the others.
        return await asyncio.shield(asking)

    def _drop(self, key: Hashable, done: asyncio.Future[V]) -> None:
        del self._asking[key]
        if not done.cancelled():
            done.exception()  # read, as all who asked may have gone

    async def _ask(
        self, key: Hashable, question: Callable[[], Awaitable[V]], accepted: Callable[[V], bool]
    ) -> V:
        try:
            if key in self._answers:
                value = await question()
            else:
                async with self._places:
                    value = await question()
        except KubeUnavailableError as error:
            kept = self._answers.get(key)
            now_s = self._clock()
            if kept is None or now_s >= kept.at_s + self._stale_s:
                raise
            logger.warning("an answer of %.0f s ago is used: %s", now_s - kept.at_s, error)
            kept.fresh_until_s = min(now_s + RETRY_S, kept.at_s + self._stale_s)
            return kept.value
        now_s = self._clock()
        self._answers.pop(key, None)
        self._refusals.pop(key, None)
        good = accepted(value)
        keep_s = self._fresh_s if good else self._refused_s
        table, bound = (self._answers, MAX_ANSWERS) if good else (self._refusals, MAX_REFUSALS)
        table[key] = _Answer(value, now_s, now_s + keep_s)
        while len(table) > bound:
            table.popitem(last=False)
        return value
