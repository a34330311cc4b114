"""Holds what the api has not confirmed yet: facts in order, ledger entries in batches.

Facts decide how fast a recovery starts, so they never queue behind anything: one
task posts all that is pending at once, over a connection that is kept open.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mainstay_agent.api_client import ApiClient, ApiRefused, ApiUnavailable, plan_of
from mainstay_core.wire.facts import Fact
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_FIRST_S = 0.01
"""A server may close an idle connection just when it is used: that must not cost time."""
RETRY_MAX_S = 1.0
"""Retries are this far apart at most: a recovery must not wait long for an api that is back."""
MAX_LEDGER = 4096
"""Ledger entries held here, posted or not. The api mirrors them; ours answer when it forgets."""
MAX_BATCH = 256


class Backoff:
    """Delays between attempts, doubled up to a bound."""

    def __init__(self, first_s: float = RETRY_FIRST_S, max_s: float = RETRY_MAX_S) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._next_s = first_s

    def reset(self) -> None:
        """Start with the first delay again."""
        self._next_s = self._first_s

    async def wait(self) -> None:
        """Sleep for the next delay."""
        delay_s, self._next_s = self._next_s, min(self._max_s, self._next_s * 2)
        await asyncio.sleep(delay_s)


async def until_answered(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeat a request until the api answers it.

    Raises:
        ApiRefused: it answered no.
    """
    backoff = Backoff()
    told = False
    while True:
        try:
            return await call()
        except ApiUnavailable as error:
            if not told:
                logger.warning("%s: the api does not answer (%s); trying again", what, error)
                told = True
            await backoff.wait()


class FactOutbox:
    """Facts in order, each until it is acknowledged or outdated.

    Args:
        client: the api.
        on_plan: called with every plan that an answer carries.
        register: introduces the pod again to an api that has forgotten it.
        on_heard: called with every fact that was acknowledged.
    """

    def __init__(
        self,
        client: ApiClient,
        on_plan: Callable[[Plan], None],
        register: Callable[[], Awaitable[None]],
        on_heard: Callable[[Fact], None],
    ) -> None:
        self._client = client
        self._on_plan = on_plan
        self._register = register
        self._on_heard = on_heard
        self._backoff = Backoff()
        self._away = False
        self._pending: deque[Fact] = deque()
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, fact: Fact) -> None:
        """Add a fact, unless the very same one waits already."""
        if fact not in self._pending:
            self._pending.append(fact)
            self._empty.clear()
            self._changed.set()

    async def wait_empty(self) -> None:
        """Wait until everything was heard."""
        await self._empty.wait()

    async def run(self) -> None:
        """Post what is pending, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                await self._post(tuple(self._pending)[:MAX_BATCH])
            self._empty.set()

    async def _post(self, facts: tuple[Fact, ...]) -> bool:
        """Post once; return whether it was heard. After a failure all that waits is posted."""
        plan: Plan | None
        refused = False
        try:
            plan = await self._client.post_facts(facts)
        except ApiUnavailable as error:
            if not self._away:
                logger.warning("facts: the api does not answer (%s); trying again", error)
            self._away = True
            await self._backoff.wait()
            return False
        except ApiRefused as refusal:
            if refusal.is_unknown:
                await self._register()
                await self._backoff.wait()
                return False
            if len(facts) > 1:
                # One refused fact must not take the others along.
                for fact in facts:
                    if not await self._post((fact,)):
                        return False
                return True
            logger.info("%s refused: %s", facts[0].kind, refusal)
            plan = plan_of(refusal)
            refused = True
        self._away = False
        self._backoff.reset()
        for fact in facts:
            self._pending.remove(fact)
        if plan is not None:
            self._on_plan(plan)
        if not refused:
            # After the plan: it says what the api had decided when it heard.
            for fact in facts:
                self._on_heard(fact)
        return True


class LedgerOutbox:
    """The newest ledger entries of this pod, and which of them the api has not mirrored yet.

    Args:
        client: the api.
        register: introduces the pod again to an api that has forgotten it.
    """

    def __init__(self, client: ApiClient, register: Callable[[], Awaitable[None]]) -> None:
        self._client = client
        self._register = register
        self._held: deque[LedgerEntry] = deque(maxlen=MAX_LEDGER)
        self._pending: deque[LedgerEntry] = deque(maxlen=MAX_LEDGER)
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, entry: LedgerEntry, *, post: bool) -> None:
        """Hold an entry; with ``post`` mirror it to the api."""
        self._held.append(entry)
        if post:
            self._pending.append(entry)
            self._empty.clear()
            self._changed.set()

    def repeat(self) -> None:
        """Mirror all that is held once more: the api has lost what it had."""
        if self._held:
            self._pending = deque(self._held, maxlen=MAX_LEDGER)
            self._empty.clear()
            self._changed.set()

    async def wait_empty(self) -> None:
        """Wait until everything was mirrored."""
        await self._empty.wait()

    async def run(self) -> None:
        """Post what is pending, for ever: what comes during a request is the next batch."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(MAX_BATCH, len(self._pending)))]
                await self._post(batch)
            self._empty.set()

    async def _post(self, batch: list[LedgerEntry]) -> None:
        backoff = Backoff()
        while True:
            try:
                await until_answered(lambda: self._client.post_ledger(batch), "ledger")
            except ApiRefused as refusal:
                if refusal.is_unknown:
                    await self._register()
                    await backoff.wait()
                    continue
                logger.error("%d ledger entries refused: %s", len(batch), refusal)
            return
