"""Answers what supervisors ask about their job: which event it is, and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.control_plane.job_store import BeatReply
from mainstay_core.control_plane.transactions import JobTransactions
from mainstay_core.coordinator.events import FactsReported, PlanReported, PodRegistered
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import TERMINAL, JobPhase
from mainstay_core.wire.api import HeartbeatReply, HeldJob
from mainstay_core.wire.facts import Fact, Heartbeat, PodRegistration
from mainstay_core.wire.plan import Plan

STANDING = frozenset({*TERMINAL, JobPhase.SUSPENDED})
"""Phases for which a supervisor ends."""


class StaleFactsError(MainstayError):
    """All facts of a request are about an older quorum.

    Args:
        why: what is stale, in one sentence.
        plan: the newest plan; None if the teller holds it.
    """

    def __init__(self, why: str, plan: Plan | None) -> None:
        super().__init__(why)
        self.plan = plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The answer to a pod's registration."""

    config: JobConfig
    plan: Any
    """The newest plan in the store's form; None before the first."""
    cursor: str
    """Stream position at which the plan is current."""
    restored_at_s: float


class SupervisorAnswers(JobTransactions):
    """One job as one replica of the api serves it to the job's supervisors."""

    async def register(self, registration: PodRegistration, held: QuorumId | None) -> Registered:
        """Take a pod in. Repeating it is harmless; a pod that counted as gone is back."""
        await self.apply(PodRegistered(registration=registration), held)
        # The position first: what is decided after it reaches the pod by the stream.
        plan, cursor, _ = await self._store.fetch_plan()
        state = (await self.load()).state
        return Registered(
            config=state.config, plan=plan, cursor=cursor, restored_at_s=state.restored_at_s
        )

    async def take_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Note that a pod is alive, and say which quorum is the newest.

        Raises:
            UnregisteredPodError: the pod is unknown, or counts as gone.
        """
        return heartbeat_reply(heartbeat.pod, await self.beat(heartbeat))

    async def take_facts(
        self, facts: Sequence[Fact], supervisor: str, held: QuorumId | None
    ) -> Plan | None:
        """Learn facts that were learnt in this order.

        Args:
            facts: what was told.
            supervisor: name of the supervisor's process that tells.
            held: the quorum of the newest plan that it holds.

        Returns:
            The newest plan; None if there is none, or the teller holds it. In a recovery every
            member tells several facts: to answer each with a plan of all members would cost the
            square of their number.

        Raises:
            StaleFactsError: all of them are about an older quorum.
        """
        event = FactsReported(facts=tuple(facts), supervisor=supervisor)
        outcome = await self.apply(event, held)
        plan = outcome.state.plan
        lacking = None if plan is not None and plan.quorum == held else plan
        if outcome.stale:
            raise StaleFactsError(outcome.reason, lacking)
        return lacking

    async def take_held(self, held: HeldJob) -> Plan | None:
        """Learn a plan that a supervisor holds and the store does not; return the newest plan."""
        report = report_of(held)
        return None if report is None else (await self.apply(report)).state.plan


def heartbeat_reply(pod: PodUid, reply: BeatReply) -> HeartbeatReply:
    """Return what a supervisor is answered.

    Raises:
        UnregisteredPodError: the pod is unknown, or counts as gone.
    """
    if not reply.known and reply.phase is not JobPhase.SUSPENDED:
        raise UnregisteredPodError(f"pod {pod} is unknown or counts as gone")
    state = reply.phase.value if reply.phase in STANDING and reply.phase else "running"
    return HeartbeatReply(quorum=reply.quorum, state=state, restored_at_s=reply.restored_at_s)


def report_of(held: HeldJob) -> PlanReported | None:
    """Return what a supervisor tells of its plan; None if it held none."""
    if held.plan is None:
        return None
    return PlanReported(
        pod=held.pod,
        plan=held.plan,
        step=held.step,
        fingerprint=held.fingerprint,
        fired=held.fired,
        approximate_since=held.approximate_since,
    )
