"""One pod as its supervisor runs it: events to the state machine, its actions to the shell.

A shell subclasses :class:`Pod`. It owns the sockets of launcher and trainers, the gather
server, the way to the api and the clock, and turns what comes over them into calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from mainstay_core.base.errors import LocalProtocolError, RemoteProtocolError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid
from mainstay_core.dmr.findings import Finding
from mainstay_core.supervisor.conversation import ApiPort, Conversation
from mainstay_core.supervisor.events import (
    Action,
    Committed,
    Ended,
    Event,
    Fork,
    Forward,
    HeartbeatDue,
    LauncherLost,
    LauncherUp,
    PlanReceived,
    Release,
    SendFact,
    Signal,
    StopTrainers,
)
from mainstay_core.supervisor.gossip import offer_after_s
from mainstay_core.supervisor.held_job import held_job_of
from mainstay_core.supervisor.machine import initial, next_due_s, step
from mainstay_core.supervisor.slots import line_of
from mainstay_core.supervisor.state import SlotPhase, SlotState
from mainstay_core.wire.api import HeldJob, Registration
from mainstay_core.wire.facts import Heartbeat, PodRegistration, SlotStatus
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan


class Pod(ABC):
    """A pod's supervisor without its sockets.

    Args:
        job: the pod's job; plans of others are not learnt.
        uid: the pod.
        num_slots: its slots.
        port: how its requests reach the api.
    """

    def __init__(self, job: JobUid, uid: PodUid, num_slots: int, port: ApiPort) -> None:
        self._job = job
        self.state = initial(uid, num_slots)
        self.conversation = Conversation(port, self)
        self.launcher: Any = None
        """The connection of the launcher; None without one."""
        self._works = False
        self._has_findings = False

    # What the shell does ---------------------------------------------------------

    @abstractmethod
    def now_s(self) -> float:
        """Return the wall clock, which never jumps, in seconds."""

    @abstractmethod
    def draw_nonce(self) -> str:
        """Return random text."""

    @abstractmethod
    def wake_at(self, due_s: float | None) -> None:
        """Feed a Tick at ``due_s`` or a little later, and no earlier one; None: none at all."""

    @abstractmethod
    def call_later(self, delay_s: float, call: Callable[[Plan], None], plan: Plan) -> None:
        """Call after ``delay_s``."""

    @abstractmethod
    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """Run a procedure beside the others."""

    @abstractmethod
    def hold(self, plan: Plan) -> None:
        """Answer with this plan whoever meets here in an older quorum."""

    @abstractmethod
    def offer_to(self, address: str, plan: Plan) -> None:
        """Begin a conversation with another supervisor (:mod:`mainstay_core.supervisor.gossip`)."""

    @abstractmethod
    def send_trainers(self, action: Forward | StopTrainers) -> None:
        """Send a plan, or the word to stop, to the trainers of the action's slots."""

    @abstractmethod
    def send_launcher(self, action: Fork | Signal) -> None:
        """Have the launcher fork or signal a trainer."""

    @abstractmethod
    async def wait_quiet(self) -> None:
        """Wait until nobody meets at this pod's gather server."""

    @abstractmethod
    def leave(self, exit_code: int) -> None:
        """Dismiss the launcher and end the supervisor."""

    @abstractmethod
    def registration(self) -> PodRegistration:
        """Return what the pod introduces itself with."""

    @abstractmethod
    def welcomed(self, answer: Registration) -> None:
        """Take up what the api has answered to a registration, before trainers are forked."""

    @abstractmethod
    def log(self, reason: str) -> None:
        """Log why something was decided; an empty reason is no news."""

    def status_of(self, slot: SlotState) -> SlotStatus:
        """Return a slot's line in the heartbeat."""
        return line_of(slot)

    def held_job(self) -> HeldJob | None:
        """Return what is held of the job, for an api that has lost it; None if nothing."""
        return held_job_of(
            self.state,
            self.conversation.registered,
            approximate_since=self.conversation.approximate_since,
        )

    # Decisions ---------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Have the state machine decide, and carry out what it says."""
        held = self.state.plan
        done = step(self.state, event, self.now_s(), self.draw_nonce())
        self.state = done.state
        plan = done.state.plan
        if plan is not None and plan is not held:
            self.hold(plan)
            self.call_later(offer_after_s(self.conversation.stands), self._pass_on, plan)
        self.log(done.reason)
        for action in done.actions:
            self._act(action)
        self.wake_at(next_due_s(self.state))

    def _act(self, action: Action) -> None:
        match action:
            case SendFact():
                self.conversation.tell(action.fact)
            case Forward() | StopTrainers():
                self.send_trainers(action)
            case Fork() | Signal():
                self.send_launcher(action)
            case Release():
                self.spawn(self._end_when_quiet())
            case _:
                self.leave(action.exit_code)

    async def _end_when_quiet(self) -> None:
        """End the pod once all who meet here have moved on to the plan without it."""
        await self.wait_quiet()
        self.feed(Ended("its work is handed over", handed_over=True))

    def heartbeat(self) -> Heartbeat:
        """Return what the pod says of itself now."""
        self.feed(HeartbeatDue())
        plan = self.state.plan
        return Heartbeat(
            pod=self.state.pod,
            slots=tuple(self.status_of(slot) for slot in self.state.slots),
            quorum=None if plan is None else plan.quorum,
        )

    # Plans that come another way than from the api -----------------------------------

    def learn_passed(self, plan: Plan) -> None:
        """Learn a plan that another supervisor, or a trainer, has passed on.

        The api's stream has not brought it, perhaps to nobody: it is offered at once.
        """
        if plan.job != self._job:
            self.log(f"a plan of job {plan.job} was passed on to this one")
            return
        held = self.state.plan
        self.feed(PlanReceived(plan))
        if plan is not held:
            self._pass_on(plan)

    def _pass_on(self, plan: Plan) -> None:
        if plan is self.state.plan and self.state.met != plan.quorum:
            self.offer()

    def stream_ended(self) -> None:
        """Offer a plan that may have reached this pod alone: the api may be gone."""
        if self.state.plan is not None:
            self._pass_on(self.state.plan)

    def offer(self) -> None:
        """Compare plans with the neighbours."""
        plan = self.state.plan
        if plan is not None:
            for address in plan.neighbours(self.state.pod):
                self.offer_to(address, plan)

    # Launcher and trainers -------------------------------------------------------------

    def launcher_came(self, launcher: object) -> None:
        """The launcher has connected.

        Raises:
            RemoteProtocolError: there is one already.
        """
        if self.launcher is not None:
            raise RemoteProtocolError("there is a launcher already")
        self.launcher = launcher
        self.feed(LauncherUp())
        if not self._works:
            self._works = True
            self.spawn(self.work())

    async def work(self) -> None:
        talk = self.conversation
        config = await talk.register()
        self.spawn(talk.tell_facts())
        self.spawn(talk.mirror_ledger())
        self.spawn(talk.beat(config.heartbeat_s))
        self.spawn(talk.follow_stream())

    def launcher_left(self) -> None:
        """The launcher's connection has ended."""
        self.launcher = None
        self.feed(LauncherLost())

    def check_hello(self, slot: int, incarnation: Incarnation) -> None:
        """Let nobody in but the trainer that was forked last.

        Raises:
            RemoteProtocolError: it is another one.
        """
        if not 0 <= slot < len(self.state.slots):
            raise RemoteProtocolError(f"there is no slot {slot}")
        expected = self.state.slots[slot]
        if expected.incarnation != incarnation or expected.phase is not SlotPhase.FORKING:
            raise RemoteProtocolError(f"{incarnation} is not the trainer that slot {slot} awaits")

    def note_finding(self, finding: Finding, incarnation: Incarnation, at_s: float) -> None:
        """Take what a trainer has found; it is told to the api.

        Args:
            finding: what was found.
            incarnation: of the trainer.
            at_s: wall clock.
        """
        if not self._has_findings:
            # Few jobs have any: the others have no task for them.
            self._has_findings = True
            self.spawn(self.conversation.mirror_findings())
        self.conversation.find(finding, incarnation, at_s)

    def record(self, slot: int, incarnation: Incarnation, entry: LedgerEntry, post: bool) -> None:
        """Take a trainer's ledger entry: it has committed a step."""
        self.conversation.record(entry, post=post)
        with suppress(LocalProtocolError):  # its end was seen first
            self.feed(Committed(slot, incarnation, entry.step))
