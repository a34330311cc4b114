"""Decides whether a person may allow lost stages to be made anew from others, for one recovery.

The policy of the job stays as it is. A permission is for a job that waits: nobody holds some stage,
and no trainer is free to take its place. Once one is, the job would go back to its newest exact
source without it. A job that has a trainer to spare never waits, but goes back at once. So a person
may also say it ahead, of a job that is whole: for one recovery that would lose more than so many
steps otherwise. The plan that uses a permission takes it away from the state, so that there is no
second one by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.words import count
from mainstay_core.coordinator import ladder
from mainstay_core.coordinator.events import (
    Announce,
    ApproximationAllowed,
    ApproximationWithdrawn,
    Transition,
)
from mainstay_core.coordinator.lineage import is_known, prospects_of, why_never
from mainstay_core.coordinator.situation import (
    AT_ONCE,
    find_situation,
    lost_stages,
    permission_of,
    permitted_rules,
    rules_of,
    waits_until,
)
from mainstay_core.coordinator.state import CoordinatorState, all_settled, lost_members
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.checkpoint_manifest import shown
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.reinitialisation import Permission, describe_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to whether a permission would have an effect, and which."""

    applies: bool
    reason: str
    """One sentence: what would be made of what; or why nothing would."""
    why_not: tuple[str, ...] = ()
    """The ladder's sentences on the rows that it passes over."""
    stages: tuple[int, ...] = ()
    """Those that nobody holds; of a permission given ahead, those that it is for."""
    lost_steps: int = 0
    """Committed steps that the job would lose without it now."""


class NotApplicableError(RemoteProtocolError):
    """A permission would have no effect.

    Args:
        verdict: says why.
    """

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def judge_permission(
    state: CoordinatorState,
    stages: Sequence[int] | None,
    now_s: float,
    after_lost_steps: int | None = None,
) -> Verdict:
    """Return what a permission to make stages anew from others would come to now.

    Args:
        state: of the job.
        stages: those that it is for; None: those that are lost, or, ahead of a loss, all.
        now_s: wall clock.
        after_lost_steps: ahead of a loss, the most steps that are given up rather; None: it is for
            the recovery that the job waits for.
    """
    if after_lost_steps is not None:
        return _judge_ahead(state, stages, after_lost_steps)
    lost = lost_stages(state)
    rules = permitted_rules(state.config)
    why = _why_now(state, lost) or why_never(state, rules) or _why_these(lost, stages)
    why = why or _why_allowed(state, now_s)
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
    lost_steps = _steps_to_lose(state)
    source = _newest_source(state)
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


def _judge_ahead(
    state: CoordinatorState, stages: Sequence[int] | None, after_lost_steps: int
) -> Verdict:
    """Return what a permission comes to that is given while nothing is lost."""
    every = tuple(range(state.shape.stages))
    named = every if stages is None else tuple(sorted(set(stages)))
    unknown = [stage for stage in named if stage not in every]
    permission = Permission(who="", at_s=0.0, stages=named, after_lost_steps=after_lost_steps)
    given = replace(state, permission=None, ahead=permission)
    prospects = {p.stage: p for p in prospects_of(given)}
    why_not = tuple(dict.fromkeys(p.reason for p in prospects.values() if not p.possible))
    why = _why_not_ahead(state)
    if not why and after_lost_steps >= state.shape.steps:
        why = (
            f"after_lost_steps: is {after_lost_steps}, and the job has {state.shape.steps} steps: "
            "it could never lose more; must be less than that"
        )
    if not why and unknown:
        why = f"the job has stages 0 to {every[-1]}, and no {describe_stages(unknown)}"
    if not why and not named:
        why = "a permission for no stage allows nothing: name one, or leave them out"
    later = [stage for stage in _could_load_alone(given) if stage in named]
    may = {stage for stage in every if prospects[stage].possible}.union(later)
    possible = [stage for stage in named if stage in may]
    if not why and not (possible if stages is None else len(possible) == len(named)):
        refused = [stage for stage in named if stage not in possible]
        why = "; ".join(dict.fromkeys(prospects[stage].reason for stage in refused))
        why += _why_not_alone(given, refused)
    if why:
        return Verdict(applies=False, reason=why, why_not=why_not, stages=lost_stages(state))
    lost_steps = _steps_to_lose(state)
    return Verdict(
        applies=True,
        reason=f"a permission ahead of the loss, {permission.describe()}: the job is approximate "
        f"from there on. Now it would go back to {_newest_source(state)}, and lose "
        f"{count(lost_steps, 'step')}{_what_is_to_come(given, later)}",
        why_not=why_not,
        stages=named,
        lost_steps=lost_steps,
    )


def _could_load_alone(given: CoordinatorState) -> tuple[int, ...]:
    """Return the stages that only a checkpoint could bring back that is still to be written.

    Args:
        given: the job as if it had the permission ahead that is asked for.
    """
    now = {p.stage for p in prospects_of(given) if p.possible}
    step = max(given.step, 1)
    saved = replace(given, step=step, durable=step)
    return tuple(p.stage for p in prospects_of(saved) if p.possible and p.stage not in now)


def _what_is_to_come(given: CoordinatorState, stages: Sequence[int]) -> str:
    """Return what some stages could be made of later, as the end of a sentence; empty for none."""
    if not stages:
        return ""
    rules = rules_of(given)
    assert rules is not None
    steps = count(rules.stale_steps, "step")
    return (
        f"; {describe_stages(stages)} can be made anew only if there is a checkpoint of at most "
        f"{steps} ago by then, which is loaded there alone: now there is none"
    )


def _why_not_alone(given: CoordinatorState, stages: Sequence[int]) -> str:
    """Return by what limit some stage would load its checkpoint alone; empty if by none.

    Args:
        given: the job as if it had the permission ahead that is asked for.
        stages: those that can be made of nothing by it.
    """
    assert given.ahead is not None
    any_loss = replace(given, ahead=replace(given.ahead, after_lost_steps=AT_ONCE))
    loads = {p.stage for p in prospects_of(any_loss) if p.possible}
    if not loads.union(_could_load_alone(any_loss)).intersection(stages):
        return ""
    stale_steps = permitted_rules(given.config).stale_steps
    return (
        f"; after_lost_steps: is {given.ahead.after_lost_steps}, so that all stages go back to a "
        f"checkpoint of at most {count(stale_steps, 'step')} ago; must be less than {stale_steps} "
        "for a stage to load its own alone"
    )


def _why_not_ahead(state: CoordinatorState) -> str:
    """Return why nothing is to be allowed ahead of a loss; empty if something may be."""
    why, lost = _why_never_now(state), lost_stages(state)
    if why:
        return why
    if lost and state.phase is JobPhase.WAITING:
        those = describe_stages(lost)
        return f"the job waits already, and lost is {those}: allow that recovery, and not ahead"
    if lost:
        return _recovers_already(state)
    if state.config.approximate is not None:
        return (
            "recovery.allowApproximate is on, and needs no permission: "
            "recovery.approximateAfterLostSteps says how many lost steps are too many"
        )
    return ""


def _steps_to_lose(state: CoordinatorState) -> int:
    return max(0, state.step - state.durable)


def _newest_source(state: CoordinatorState) -> str:
    return f"the checkpoint of step {state.durable}" if state.durable else "the seed"


def _why_never_now(state: CoordinatorState) -> str:
    """Return why there is nothing to recover in a job as it stands, whatever is lost."""
    if state.terminal:
        return f"the job is {state.phase}: nothing of it is to be recovered"
    if state.plan is None or state.in_force is None:
        return f"the job is {state.phase}: there is no state that could be lost"
    return ""


def _recovers_already(state: CoordinatorState) -> str:
    plan = state.plan
    assert plan is not None
    return f"the job recovers already, by {plan.method} in {plan.quorum}"


def _why_now(state: CoordinatorState, lost: Sequence[int]) -> str:
    """Return why nothing is to be allowed in a job as it stands; empty if something may be."""
    why = _why_never_now(state)
    if why:
        return why
    if not lost:
        return "every stage has a living cell that holds its state: the job is whole"
    return "" if state.phase is JobPhase.WAITING else _recovers_already(state)


def forks_by(state: CoordinatorState, now_s: float) -> Permission | None:
    """Return the permission ahead by which a job makes lost stages anew once trainers come."""
    given, rules = permission_of(state), rules_of(state)
    if given is None or not given.is_ahead or rules is None or now_s < waits_until(state, rules):
        return None
    situation = find_situation(state, len(lost_members(state)), now_s, rules)
    answer = ladder.decide(replace(situation, free_slots=len(situation.stages)))
    return given if answer.row is ladder.Row.APPROXIMATE else None


def with_permission(
    state: CoordinatorState, answer: ladder.Decision, now_s: float
) -> ladder.Decision:
    """Return why a job waits, and by whose permission ahead it goes on: nobody need give one."""
    given = forks_by(state, now_s)
    if given is None:
        return answer
    allowed = f"lost stages are made anew then, as {shown(given.who)} has allowed it"
    return replace(answer, reason=f"{answer.reason}; {allowed}")


def _why_allowed(state: CoordinatorState, now_s: float) -> str:
    """Return who has allowed already what one for the recovery at hand would; empty if nobody."""
    given = forks_by(state, now_s)
    if given is None:
        return ""
    at = datetime.fromtimestamp(given.at_s, tz=UTC).isoformat(sep=" ", timespec="seconds")
    return f"{shown(given.who)} has allowed it already, at {at}: no step is lost as it is"


def _why_these(lost: Sequence[int], stages: Sequence[int] | None) -> str:
    """Return why a permission for certain stages does not fit those that are lost."""
    if stages is None or sorted(set(stages)) == list(lost):
        return ""
    named, gone = (describe_stages(sorted(set(each))) for each in (stages, lost))
    return f"the permission is for {named}, and lost is {gone}: name just that"


def note_permission(
    state: CoordinatorState, event: ApproximationAllowed, now_s: float
) -> Transition:
    """Return the state with a person's permission.

    Raises:
        NotApplicableError: it would have no effect.
    """
    limit = event.after_lost_steps
    verdict = judge_permission(state, event.stages, now_s, limit)
    if not verdict.applies:
        raise NotApplicableError(verdict)
    given = Permission(who=event.who, at_s=now_s, stages=verdict.stages, after_lost_steps=limit)
    if given.is_ahead:
        noted, old = replace(state, ahead=given), state.ahead
        place = f" This replaces what {old.who} has allowed ahead" if old is not None else ""
        message = f"{event.who} gives {verdict.reason}{'.' if place else ''}{place}"
    else:
        noted, old = replace(state, permission=given), state.permission
        message = f"{event.who} allows one approximate recovery: {verdict.reason}"
        if old is not None and old.is_ahead:  # its recovery was cut short
            message += f". This ends what {old.who} has allowed ahead"
    return Transition(
        state=noted,
        actions=(Announce(code="ApproximationAllowed", message=message, warning=True),),
        reason=message,
    )


def note_withdrawal(
    state: CoordinatorState, event: ApproximationWithdrawn, now_s: float
) -> Transition:
    """Return the state without the permissions that are not used yet.

    Raises:
        NotApplicableError: there is none, or its plan is made: members may have carried it out.
    """
    del now_s
    used = _used_now(state)
    at_hand = None if used is not None else state.permission
    taken = [given for given in (at_hand, state.ahead) if given is not None]
    if not taken:
        why = _why_never_now(state) if state.terminal else ""
        if used is not None and state.plan is not None:
            how = "is carried out already"
            if state.phase is JobPhase.WAITING:
                how = "is ordered, and goes on once a trainer comes"
            why = f"{state.plan.quorum} {how}, as {shown(used.who)} has allowed it"
        why = why or "nobody has given a permission that is not used yet"
        raise NotApplicableError(Verdict(applies=False, reason=why, stages=lost_stages(state)))
    whose = " and ".join(f"what {p.who} has allowed {p.describe()}" for p in taken)
    message = f"{event.who} takes back {whose}"
    state = replace(state, permission=used, ahead=None)
    if state.waiting is not None:
        # Its reason may name the permission: it is said anew.
        state = replace(state, waiting=replace(state.waiting, lack=None))
    return Transition(
        state=state,
        actions=(Announce(code="ApproximationWithdrawn", message=message),),
        reason=message,
    )


def _used_now(state: CoordinatorState) -> Permission | None:
    """Return the permission of a fork of which it is not known yet that all go on from it."""
    # After a suspension nobody carries the fork out any more.
    is_open = state.in_force is not None and state.in_force.fork is not None
    is_open = is_open and not state.commits and not all_settled(state)
    return state.permission if is_open else None


def take_used(state: CoordinatorState) -> Transition:
    """Return the state without a recovery's permission, as all are about to go on from it.

    One that was given ahead counts again, unless there is a newer one, if nothing was made anew by
    it: the members have found an exact source after all, more was lost than can be made anew, or
    the job was suspended meanwhile. Where the history of their states is not told yet, nobody knows
    that, and it is used up.
    """
    unused, is_unused = state.permission, is_known(state)
    state = replace(state, permission=None)
    if unused is None or not (unused.is_ahead and is_unused) or state.ahead is not None:
        return Transition(state=state)
    message = f"nothing was made anew: what {shown(unused.who)} has allowed counts again, "
    message += unused.describe()
    return Transition(
        state=replace(state, ahead=unused),
        actions=(Announce(code="ApproximationAllowed", message=message, warning=True),),
        reason=message,
    )


def use_permission(state: CoordinatorState, plan: Plan) -> tuple[CoordinatorState, str]:
    """Return the state after a recovery's plan is made, and who has allowed it for this once.

    One that was given ahead is for this recovery alone from now on, as if the job had waited for
    it: it lasts while the recovery is interrupted, and longer only if it makes nothing anew
    (:func:`take_used`).

    Returns:
        (state, name); the name is empty if nobody had to allow it.
    """
    permission = permission_of(state) if plan.method is Method.APPROXIMATE else None
    if permission is None:
        return state, ""
    if permission is state.ahead:
        state = replace(state, permission=permission, ahead=None)
    return state, permission.who
