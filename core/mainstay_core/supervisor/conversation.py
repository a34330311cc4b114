"""The standing conversation of a pod with the api: registration, facts, ledger, heartbeats, plans.

The stream brings plans in milliseconds; heartbeats find out within an interval what a broken
stream has missed. Both feed the same events: a plan that comes twice is no news.

What is said, and what follows from each answer, is here; a port carries it. The procedures
await nothing but that port, so asyncio drives them in a supervisor, and simulated time in the
simulation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Protocol, TypeVar

from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.base.words import count
from mainstay_core.dmr.findings import Finding
from mainstay_core.job.config import JobConfig
from mainstay_core.supervisor.events import (
    Ended,
    Event,
    LeaveAcknowledged,
    PlanReceived,
    Registered,
)
from mainstay_core.supervisor.findings import FindingOutbox
from mainstay_core.supervisor.outbox import (
    Answer,
    Away,
    Backoff,
    FactOutbox,
    Heard,
    LedgerOutbox,
    Refused,
    Unknown,
    told,
)
from mainstay_core.supervisor.state import SupervisorLimits
from mainstay_core.wire.api import (
    ApiRefused,
    ApiUnavailable,
    Failure,
    HeartbeatReply,
    HeldJob,
    Registration,
)
from mainstay_core.wire.facts import Fact, Heartbeat, Leaving, PodRegistration
from mainstay_core.wire.findings import ToldFinding
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

T = TypeVar("T")

UNKNOWN_JOB_S = 60.0
"""How long a pod that knows nothing of its job waits for a store that has lost it to be told."""


class Flag(Protocol):
    """A flag that one task sets and another waits for."""

    def set(self) -> None: ...
    def clear(self) -> None: ...
    def is_set(self) -> bool: ...
    async def wait(self) -> Any: ...


class ApiPort(Protocol):
    """The way of requests to the api, and the passing of time meanwhile.

    Every request raises ApiUnavailable without an answer, and ApiRefused if the answer is no.
    """

    async def register(self, registration: PodRegistration) -> Registration: ...
    async def recover_store(self, held: HeldJob) -> None: ...
    async def post_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply: ...
    async def post_facts(self, facts: tuple[Fact, ...]) -> Plan | None: ...
    async def post_ledger(self, entries: tuple[LedgerEntry, ...]) -> None: ...
    async def post_findings(self, findings: tuple[ToldFinding, ...]) -> None: ...
    async def fetch_plan(self) -> Plan | None: ...

    async def follow(
        self, cursor: str, opened: Callable[[], None], take: Callable[[str, Event | None], None]
    ) -> None:
        """Read the stream until it ends.

        Args:
            cursor: the last entry that was read.
            opened: to call whenever the stream is seen to stand.
            take: to call with each entry's id ("" if it has none) and what it says, if that
                is the state machine's business.
        """

    async def sleep(self, delay_s: float) -> None: ...
    def now_s(self) -> float: ...
    def flag(self) -> Flag: ...
    def lock(self) -> AbstractAsyncContextManager[Any]: ...
    def say(self, level: str, text: str) -> None: ...


class PodPort(Protocol):
    """The pod that the conversation speaks for."""

    def feed(self, event: Event) -> None:
        """Have the pod's state machine decide."""

    def registration(self) -> PodRegistration:
        """Return what the pod introduces itself with."""

    def heartbeat(self) -> Heartbeat:
        """Return what the pod says of itself now."""

    def held_job(self) -> HeldJob | None:
        """Return what is held of the job, for an api that has lost it; None if nothing."""

    def welcomed(self, answer: Registration) -> None:
        """Take up what the api has answered to a registration, before anything follows of it."""

    def offer(self) -> None:
        """Offer the newest plan to other supervisors: the api does not answer."""

    def stream_ended(self) -> None:
        """Take note that the api's stream has broken off: it may have brought others nothing."""


class Conversation:
    """Keeps one pod in touch with the api."""

    def __init__(self, port: ApiPort, pod: PodPort) -> None:
        self._port, self._pod = port, pod
        self._facts = FactOutbox()
        self._facts_changed, self._facts_told = port.flag(), port.flag()
        self._facts_told.set()
        self._ledger = LedgerOutbox()
        self._ledger_changed, self._ledger_told = port.flag(), port.flag()
        self._ledger_told.set()
        self._findings = FindingOutbox()
        self._findings_changed, self._findings_told = port.flag(), port.flag()
        self._findings_told.set()
        self._registering = port.lock()
        self._cursor = ""
        self._away = False
        self._awaited: QuorumId | None = None
        """Quorum of a plan that a heartbeat's answer named before it was here."""
        self.registered: Registration | None = None
        """The api's newest answer to a registration."""
        self.stands = False
        """Whether the stream is open."""

    # Registration --------------------------------------------------------------

    async def register(self) -> JobConfig:
        """Introduce the pod, however long it takes; return the job.

        Raises:
            ApiRefused: the api does not accept this pod.
        """
        before = self.registered
        async with self._registering:
            answer = await self._introduce()
            self._cursor = self._cursor or answer.cursor
            if answer.plan is not None:
                self._pod.feed(PlanReceived(answer.plan))
        self.registered = answer
        if before is not None and before.restored_at_s != answer.restored_at_s:
            self._ledger = self._ledger.repeat()
            self._ring_ledger()
            self._findings = self._findings.repeat()
            self._ring_findings()
        self._pod.welcomed(answer)
        self._pod.feed(Registered(settings_of(answer.config)))
        return answer.config

    async def register_again(self) -> None:
        """Introduce the pod anew: its store has moved, or the api has forgotten it."""
        try:
            await self.register()
        except ApiRefused as refusal:
            # Training does not end because the api has lost the job.
            self._port.say("error", f"registration refused: {refusal}")

    async def _introduce(self) -> Registration:
        ends_s = self._port.now_s() + UNKNOWN_JOB_S
        registration, backoff = self._pod.registration(), Backoff()
        while True:
            try:
                return await self.until_answered(
                    lambda: self._port.register(registration), "registration"
                )
            except ApiRefused as refusal:
                held = self._pod.held_job()
                patient = held is not None or self._port.now_s() < ends_s
                if not (refusal.is_unknown and patient):
                    raise
                self._port.say("warning", f"registration refused: {refusal}")
            if held is not None:
                await self._recover_store(held)
            backoff = await self._wait(backoff)

    async def _recover_store(self, held: HeldJob) -> None:
        await self.until_answered(lambda: self._port.recover_store(held), "recovery of the store")

    @property
    def approximate_since(self) -> int | None:
        """Since which step the pod knows the job to be approximate; None: it is exact."""
        return self._ledger.approximate_since

    # Facts and ledger entries --------------------------------------------------

    def tell(self, fact: Fact) -> None:
        """Tell a fact until it is acknowledged."""
        self._facts = self._facts.put(fact)
        self._facts_told.clear()
        self._facts_changed.set()

    def record(self, entry: LedgerEntry, *, post: bool) -> None:
        """Hold a ledger entry; with ``post`` mirror it to the api."""
        self._ledger = self._ledger.put(entry, post=post)
        if post:
            self._ring_ledger()

    def _ring_ledger(self) -> None:
        if self._ledger.waiting:
            self._ledger_told.clear()
            self._ledger_changed.set()

    def find(self, finding: Finding, incarnation: Incarnation, at_s: float) -> None:
        """Tell what a trainer has found, or count it if too many wait.

        Args:
            finding: what was found.
            incarnation: of the trainer.
            at_s: wall clock.
        """
        self._findings = self._findings.put(finding, incarnation, at_s)
        self._ring_findings()

    def _ring_findings(self) -> None:
        if self._findings.waiting:
            self._findings_told.clear()
            self._findings_changed.set()

    @property
    def has_mirrored(self) -> bool:
        """Whether every ledger entry that the api is to have was answered."""
        return self._ledger_told.is_set()

    @property
    def has_told(self) -> bool:
        """Whether every fact was answered."""
        return self._facts_told.is_set()

    async def wait_told(self) -> None:
        """Wait until every fact and finding was heard and every entry mirrored."""
        await self._facts_told.wait()
        await self._ledger_told.wait()
        if not self._findings_told.is_set():
            await self._findings_told.wait()

    async def tell_facts(self) -> None:
        """Tell what waits, for ever: what comes during a request is in the next one."""
        while True:
            await self._facts_changed.wait()
            self._facts_changed.clear()
            while self._facts.waiting:
                await self._tell()
            self._facts_told.set()

    async def _tell(self) -> None:
        self._facts, batch = self._facts.ask()
        answer = await self._ask(batch)
        after = told(self._facts, batch, answer)  # of the facts as they are now
        self._facts = after.outbox
        if after.register:
            await self.register_again()
        if after.wait_s:
            await self._port.sleep(after.wait_s)
        if after.plan is not None:
            self._pod.feed(PlanReceived(after.plan))
        # After the plan: it says what the api had decided when it heard.
        if any(isinstance(fact, Leaving) for fact in after.heard):
            self._pod.feed(LeaveAcknowledged())

    async def _ask(self, batch: tuple[Fact, ...]) -> Answer:
        try:
            plan = await self._port.post_facts(batch)
        except ApiUnavailable as error:
            return self._not_heard("warning", f"facts: {_why(error)}", error.retry_after_s)
        except ApiRefused as refusal:
            if refusal.is_unknown:
                return Unknown()
            if refusal.is_not_understood:
                return self._not_heard("error", f"facts: the api is too old for them ({refusal})")
            if refusal.failure is Failure.UNAUTHORIZED:
                # Of who tells, and nothing of what is told: rights may come back.
                return self._not_heard("error", f"facts: {refusal}")
            self._away = False
            self._port.say("info", f"{', '.join(f.kind for f in batch)} refused: {refusal}")
            return Refused(refusal.plan)
        self._away = False
        return Heard(plan)

    def _not_heard(self, level: str, why: str, wait_s: float = 0.0) -> Away:
        """Say once why facts are told again."""
        if not self._away:
            self._port.say(level, f"{why}; trying again")
        self._away = True
        return Away(wait_s)

    async def mirror_ledger(self) -> None:
        """Mirror the entries that wait, for ever: what comes meanwhile is the next batch."""
        while True:
            await self._ledger_changed.wait()
            self._ledger_changed.clear()
            while self._ledger.waiting:
                self._ledger, batch = self._ledger.take()
                told = count(len(batch), "ledger entry", "ledger entries")
                await self._mirror(partial(self._port.post_ledger, batch), "ledger", told)
            self._ledger_told.set()

    async def mirror_findings(self) -> None:
        """Tell the findings that wait, for ever: what comes meanwhile is the next batch."""
        while True:
            await self._findings_changed.wait()
            self._findings_changed.clear()
            while self._findings.waiting:
                self._findings, batch = self._findings.take()
                told = count(len(batch), "finding")
                await self._mirror(partial(self._port.post_findings, batch), "findings", told)
            self._findings_told.set()

    async def _mirror(self, post: Callable[[], Awaitable[None]], what: str, told: str) -> None:
        backoff = Backoff()
        while True:
            try:
                return await self.until_answered(post, what)
            except ApiRefused as refusal:
                if not refusal.is_unknown:
                    return self._port.say("error", f"{told} refused: {refusal}")
            await self.register_again()
            backoff = await self._wait(backoff)

    # Heartbeats and the stream -------------------------------------------------

    async def beat(self, interval_s: float) -> None:
        """Send heartbeats, for ever; they are dropped, not queued, while the api is away.

        Args:
            interval_s: seconds from one to the next.
        """
        due_s = self._port.now_s()
        while True:
            wait_s = interval_s
            try:
                await self._beat(self._pod.heartbeat())
            except ApiUnavailable as error:
                self._port.say("debug", f"heartbeat dropped: {error}")
                wait_s = max(wait_s, error.retry_after_s)
                if not error.is_busy:
                    self._pod.offer()
            except ApiRefused as refusal:
                self._port.say("warning", f"heartbeat refused: {refusal}")
                if refusal.is_deleted:
                    self._pod.feed(Ended("the job was deleted"))
                elif refusal.is_unknown:
                    await self.register_again()
            due_s = max(due_s + wait_s, self._port.now_s())
            await self._port.sleep(due_s - self._port.now_s())

    async def _beat(self, heartbeat: Heartbeat) -> None:
        held, reply = heartbeat.quorum, await self._port.post_heartbeat(heartbeat)
        if reply.state != "running":
            self._pod.feed(Ended(f"the job is {reply.state}"))
        elif reply.quorum is not None and self._has_missed(reply.quorum, held):
            plan = await self._port.fetch_plan()
            if plan is not None:
                self._pod.feed(PlanReceived(plan))
        assert self.registered is not None
        if reply.restored_at_s != self.registered.restored_at_s:
            await self.register_again()

    def _has_missed(self, quorum: QuorumId, held: QuorumId | None) -> bool:
        """Return whether the plan of a quorum that the api names is newer and has to be fetched.

        While the stream stands the plan is on its way, as a rule. To fetch it as well would take
        time just when the job recovers. A stream that has broken off unseen brings none: then the
        next heartbeat finds that the plan still lacks.
        """
        if held is not None and quorum.id <= held.id:
            return False
        awaited, self._awaited = self._awaited, quorum
        return not self.stands or awaited == quorum

    async def follow_stream(self) -> None:
        """Read the stream, for ever; it goes on where it broke off."""
        backoff = Backoff()

        def opened() -> None:
            nonlocal backoff
            self.stands, backoff = True, Backoff()

        while True:
            wait_s = 0.0
            try:
                await self._port.follow(self._cursor, opened, self._take)
            except (ApiUnavailable, ApiRefused) as error:
                self._port.say("info", f"{error}; opening the stream again")
                wait_s = error.retry_after_s
            if self.stands:
                self.stands = False
                self._pod.stream_ended()
            backoff = await self._wait(backoff, wait_s)

    def _take(self, entry: str, event: Event | None) -> None:
        self._cursor = entry or self._cursor
        if event is not None:
            self._pod.feed(event)

    # Attempts --------------------------------------------------------------------

    async def until_answered(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Repeat a request until the api answers it.

        Raises:
            ApiRefused: it answered no.
        """
        backoff, silent = Backoff(), False
        while True:
            try:
                return await call()
            except ApiUnavailable as error:
                if not silent:
                    self._port.say("warning", f"{what}: {_why(error)}; trying again")
                silent = True
                backoff = await self._wait(backoff, error.retry_after_s)

    async def _wait(self, backoff: Backoff, at_least_s: float = 0.0) -> Backoff:
        await self._port.sleep(max(backoff.next_s, at_least_s))
        return backoff.after_one()


def _why(error: ApiUnavailable) -> str:
    """Return why a request is sent again."""
    said = "asks for fewer requests" if error.is_busy else "does not answer"
    return f"the api {said} ({error})"


def settings_of(config: JobConfig) -> SupervisorLimits:
    """Return how patient the supervisors of a job are."""
    return SupervisorLimits(
        max_restarts=config.max_restarts,
        hang_s=config.hang_s,
        silence_s=config.heartbeat_timeout_s,
        handover_s=config.handover_s,
    )
