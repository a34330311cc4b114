"""Leaves a quorum: adopts the newest plan, or parks until there is one.

These are transitions of the rank's state machine (:mod:`mainstay_core.rank.machine`) that every
phase shares. What was computed stays held over both, unless the newer plan makes it void.
"""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.base.ids import Slot
from mainstay_core.base.values import replace
from mainstay_core.dmr.settings import CheckRules, Mode
from mainstay_core.rank.events import (
    Action,
    DropHeld,
    DropPartials,
    Leave,
    SendFact,
    Settle,
    WaitForPlan,
    WriteCheckpoint,
)
from mainstay_core.rank.forks.repeats import OTHER_JOB, differing_norms
from mainstay_core.rank.refusals import tell_left_behind
from mainstay_core.rank.state import RankState, Transition, fact_of, must_adopt, report_of
from mainstay_core.wire.facts import MAX_SOURCES, Cause, Failed, Parked, Phase
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.segments import StoreReport

_MAY_MISS_A_ROUND = frozenset({Phase.SETTLING, Phase.HEALING, Phase.VOTING, Phase.SAVING})
"""Phases in which a rank that parks drops its pipeline. What it lost may have been complete for
other cells of its chain. These then compute, and a plan that leaves the chain intact does not
interrupt them: they would wait for this rank in the pipeline while it waits for them in the next
settle."""


def adopt(state: RankState, *prefix: Action) -> Transition:
    """Adopt the newest plan: settle as a member, or leave."""
    plan = state.newest
    assert plan is not None
    member = plan.member_of(state.slot, state.incarnation)
    if member is None or state.position != plan.position_of(member.index):
        # What is written is written for a place in the plan. Without a writer there the version is
        # not completed, and is tried again at the next boundary. What is held of another place
        # goes as a whole.
        prefix = tuple(a for a in prefix if not isinstance(a, WriteCheckpoint | DropPartials))
    counts = member is not None and _is_of(state, plan, member)
    prefix = (*tell_left_behind(state, plan, member, counts=counts), *prefix)
    if member is None:
        idle = replace(state, phase=Phase.IDLE, plan=plan, index=-1, held=(), mark=None)
        return Transition(
            idle,
            (*prefix, DropHeld(), Leave(), WaitForPlan()),
            f"{plan.quorum} has no place for this trainer",
        )
    if _is_unjudged(state, plan):
        state, prefix = replace(state, held=()), (*prefix, DropHeld())
    here = state.position == plan.position_of(member.index)
    valid = state.valid and here and counts
    new = replace(
        state,
        lineage=plan.lineage if valid else state.lineage,
        # What a store kept of another lineage makes nothing anew in this one.
        kept_from=state.kept_from if plan.lineage == state.lineage else 0,
        phase=Phase.SETTLING,
        plan=plan,
        index=member.index,
        valid=valid,
        attempt=0,
        adopt_next=False,
        step_plan=None,
        settlement=None,
    )
    if new.clean_from is None:
        new = replace(new, clean_from=member.clean_from)  # an earlier life may have been witnessed
    if plan.checks is not None:
        new = follow(new, plan.checks)
    refused = ""
    if state.valid and here and not valid:
        refused = f"; its state of lineage {state.lineage} does not count in {plan.lineage}"
    why = f"adopts {plan.quorum}{refused}"
    return Transition(new, (*prefix, Settle(plan, report_of(new))), why)


def follow(state: RankState, rules: CheckRules) -> RankState:
    """Return the state of a rank that checks by these rules from now on."""
    every = rules.witness_every_steps
    return replace(
        state,
        witness_every_steps=every,
        compares_last=every > 0 or rules.mode is Mode.FULL,
        tells_makers=every > 0 or rules.mode is not Mode.OFF,
    )


def _is_of(state: RankState, plan: Plan, member: Member) -> bool:
    """Return whether a state counts in a plan's lineage.

    Under a plan that orders a fork, states of the lineages before count as well, and belong to its
    lineage from then on. But a rank that was left out meanwhile may have applied a step that the
    others have computed again in another way since: its state is void. Nobody has gone another way
    before a fork's first plan, so one that was left out before that is a returning rank as ever.
    """
    fork = plan.fork
    if fork is None:
        return state.lineage == plan.lineage
    # Without a member nobody commits a step: what counted in a plan counts as long as it stays one.
    stayed = state.plan is not None and state.plan.quorum.id >= member.since
    is_first = state.lineage == fork.since == plan.lineage - 1
    return (stayed or is_first) and fork.since <= state.lineage <= plan.lineage


def _is_unjudged(state: RankState, plan: Plan) -> bool:
    """Return whether partials were computed with a cell of which ``plan`` hears nothing any more.

    Nobody can find out then that its state was bad. As a rule its stage has lost the same types.
    """
    return bool(state.held) and any(plan.member_of(*cell) is None for cell in state.held_with)


def fail(state: RankState, why: str, *prefix: Action) -> Transition:
    """Give up, and tell why; ``prefix``: actions that come first."""
    tell = SendFact(fact_of(state, Failed, evidence=why))
    failed = replace(state, phase=Phase.FAILED)
    return Transition(failed, (*prefix, tell, WaitForPlan()), why)


def wait_for_fork(state: RankState, number: int, *prefix: Action) -> Transition:
    """Wait for the plan that orders the next fork of the lineage that the job repeats.

    Args:
        state: of the rank, at the fork's version.
        number: of the fork.
        prefix: actions that come first.
    """
    fork = state.repeats[number]
    outline = state.fork_rules.outline if state.fork_rules is not None else ()
    other = "" if fork.chain == state.commit_chain else "it comes after other commits than here"
    other = other or differing_norms(fork, outline, state.commit)
    if other:
        why = f"the lineage to repeat has a fork at step {fork.version}: {other}: {OTHER_JOB}"
        return fail(state, why, *prefix)
    if state.phase in _MAY_MISS_A_ROUND:
        prefix = (*prefix, Leave())
    if must_adopt(state):
        return adopt(state, *prefix)
    why = f"fork {number + 1} of the lineage that the job repeats is due"
    tell = SendFact(fact_of(state, Parked, evidence=why, repeats=number))
    return Transition(replace(state, phase=Phase.PARKED), (*prefix, tell, WaitForPlan()), why)


def ask_first(state: RankState, why: str, stores: Sequence[StoreReport]) -> Transition:
    """Wait for the plan that says what becomes of a stage that no store brings back.

    Args:
        state: of the rank, whose plan has its members ask.
        why: the stage is not brought back.
        stores: what pods keep, as far as it is known.
    """
    if must_adopt(state):
        return adopt(state, Leave())
    unasked = any(report.problem for report in stores)
    tell = SendFact(fact_of(state, Parked, evidence=why, unreached=True, unasked=unasked))
    return Transition(replace(state, phase=Phase.PARKED), (Leave(), tell, WaitForPlan()), why)


def park(
    state: RankState,
    why: str,
    suspects: Sequence[int],
    *prefix: Action,
    cause: Cause,
    sources: Sequence[int] = (),
    differing: tuple[Slot, ...] = (),
    was_told: bool = False,
    doubted: tuple[Slot, ...] = (),
) -> Transition:
    """Give the quorum up and wait with everything held, or adopt a newer plan if one is known.

    Args:
        state: of the rank.
        why: the reason, for people.
        suspects: members that seem gone.
        prefix: actions that come first.
        cause: the kind of the fault.
        sources: members from which it came, beside the suspects.
        differing: slots whose state was found to differ: they are its sources, too.
        was_told: whether only others saw it.
        doubted: devices that have computed a type differently, while nobody could say which of them
            is wrong.
    """
    if state.phase in _MAY_MISS_A_ROUND:
        prefix = (*prefix, Leave())
    if must_adopt(state):
        return adopt(state, *prefix)
    assert state.plan is not None
    slots = tuple(state.plan.members[i].slot for i in suspects)
    named = {*slots, *differing, *(state.plan.members[i].slot for i in sources)}
    parked_for = fact_of(
        state,
        Parked,
        evidence=why,
        suspects=slots,
        differing=differing,
        cause=cause,
        sources=tuple(sorted(named))[:MAX_SOURCES],
        was_told=was_told,
        doubted=doubted[:MAX_SOURCES],
    )
    tell = SendFact(parked_for)
    parked = replace(state, phase=Phase.PARKED)
    return Transition(parked, (*prefix, tell, WaitForPlan()), why)
