"""Decides whether a person may allow lost stages to be made anew from others, for one recovery.

The policy of the job stays as it is. The permission is for a job that waits: nobody holds some
stage, and no trainer is free to take its place. Once one is, the job would go back to its newest
exact source without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.words import count
from mainstay_core.coordinator import ladder
from mainstay_core.coordinator.events import Announce, ApproximationAllowed, Transition
from mainstay_core.coordinator.lineage import prospects_of, why_never
from mainstay_core.coordinator.situation import (
    find_situation,
    is_permitted,
    lost_stages,
    permitted_rules,
)
from mainstay_core.coordinator.state import CoordinatorState, Permission, lost_members
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.plan import Method, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to whether a permission would have an effect, and which."""

    applies: bool
    reason: str
    """One sentence: what would be made of what; or why nothing would."""
    why_not: tuple[str, ...] = ()
    """The ladder's sentences on the rows that it passes over."""
    stages: tuple[int, ...] = ()
    """Those that nobody holds."""
    lost_steps: int = 0
    """Committed steps that the job would lose without it."""


class NotApplicableError(RemoteProtocolError):
    """A permission would have no effect.

    Args:
        verdict: says why.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def judge_permission(
    state: CoordinatorState, stages: Sequence[int] | None, now_s: float
) -> Verdict:
    """Return what a permission to make stages anew from others would come to now.

    Args:
        state: of the job.
        stages: those that it is for; None: those that are lost.
        now_s: wall clock.
    """
    lost = lost_stages(state)
    rules = permitted_rules(state.config)
    why = _why_now(state, lost) or why_never(state, rules) or _why_these(lost, stages)
    if why:
        return Verdict(applies=False, reason=why, stages=lost)
    situation = find_situation(state, len(lost_members(state)), now_s, rules)
    # A trainer for each place may still come: that is what the job waits for.
    situation = replace(situation, free_slots=len(situation.stages))
    is_kept = ladder.decide(situation).row is ladder.Row.REPLAY
    if is_kept:
        # That comes first. The permission is for the case that what is kept is not complete.
        found = tuple(replace(s, replayable=False, unreached=True) for s in situation.stages)
        situation = replace(situation, stages=found)
    answer = ladder.decide(situation)
    if answer.row is not ladder.Row.APPROXIMATE:
        _, sentence = ladder.judge_approximate(situation)
        return Verdict(applies=False, reason=sentence, why_not=answer.why_not, stages=lost)
    hows = {p.stage: p.reason for p in prospects_of(state)}
    made = "; ".join(f"stage {stage} is made anew from {hows[stage]}" for stage in lost)
    lost_steps = max(0, state.step - state.durable)
    source = f"the checkpoint of step {state.durable}" if state.durable else "the seed"
    unless = "unless what pods keep in memory brings it back: " if is_kept else ""
    return Verdict(
        applies=True,
        reason=f"{unless}{made}, as soon as a trainer is free; the job is approximate since step "
        f"{state.step} then. Otherwise it goes back to {source}, and loses "
        f"{count(lost_steps, 'step')}",
        why_not=answer.why_not,
        stages=lost,
        lost_steps=lost_steps,
    )


def _why_now(state: CoordinatorState, lost: Sequence[int]) -> str:
    """Return why nothing is to be allowed in a job as it stands; empty if something may be."""
    if state.terminal:
        return f"the job is {state.phase}: nothing of it is to be recovered"
    if state.plan is None or state.in_force is None:
        return f"the job is {state.phase}: there is no state that could be lost"
    if not lost:
        return "every stage has a living cell that holds its state: the job is whole"
    if state.phase is not JobPhase.WAITING:
        plan = state.plan
        return f"the job recovers already, by {plan.method} in {plan.quorum}"
    return ""


def _why_these(lost: Sequence[int], stages: Sequence[int] | None) -> str:
    """Return why a permission for certain stages does not fit those that are lost."""
    if stages is None or sorted(set(stages)) == list(lost):
        return ""
    named, gone = (_name(sorted(set(each))) for each in (stages, lost))
    return f"the permission is for {named}, and lost is {gone}: name just that"


def _name(stages: Sequence[int]) -> str:
    if not stages:
        return "no stage"
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def note_permission(
    state: CoordinatorState, event: ApproximationAllowed, now_s: float
) -> Transition:
    """Return the state with a person's permission.

    Raises:
        NotApplicableError: it would have no effect.
    """
    verdict = judge_permission(state, event.stages, now_s)
    if not verdict.applies:
        raise NotApplicableError(verdict)
    permission = Permission(who=event.who, at_s=now_s, stages=verdict.stages)
    message = f"{event.who} allows one approximate recovery: {verdict.reason}"
    return Transition(
        state=replace(state, permission=permission),
        actions=(Announce(code="ApproximationAllowed", message=message, warning=True),),
        reason=message,
    )


def allowed_by_whom(state: CoordinatorState, plan: Plan) -> str:
    """Return who has allowed the recovery of a plan for this once; empty if nobody had to."""
    permission = state.permission
    if permission is None or plan.method is not Method.APPROXIMATE:
        return ""
    return permission.who if is_permitted(state, permission) else ""
