"""Tells of states that a rank brings back to a job which has gone on without it.

Such a state does not count. That changes no bit, and whoever misses the state learns of it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.rank.events import Action, SendFact
from mainstay_core.rank.forks.courses import of_one_course
from mainstay_core.rank.forks.repeats import without_unmade
from mainstay_core.rank.state import RankState, fact_of
from mainstay_core.wire.facts import StateRefused
from mainstay_core.wire.plan import Member, Method, Plan
from mainstay_core.wire.votes import SettleReport


def tell_left_behind(
    state: RankState, plan: Plan, member: Member | None, *, counts: bool
) -> tuple[Action, ...]:
    """Return what a rank tells that hears of a lineage which others have begun without it.

    It tells once, when it was at work and first hears of that. Where those who stayed members go
    back together, nobody was left behind, nor are those whom that very plan moves or drops.

    Args:
        state: of the rank.
        plan: that it adopts.
        member: its place in the plan; None: it has none.
        counts: whether its state counts there.
    """
    before = state.plan
    if before is None or not state.valid or state.index < 0 or before.lineage != state.lineage:
        return ()
    stayed = member is not None and before.quorum.id >= member.since
    if plan.lineage == state.lineage or stayed or counts:
        return ()
    # The lineage begins with this very plan: those in whose lineage this state is go back as well.
    if plan.method is Method.RESTART and plan.lineage == state.lineage + 1:
        return ()
    why = f"it is of lineage {state.lineage}, and others have begun lineage {plan.lineage} since"
    return (_refused(state, why),)


def tell_other_course(state: RankState, reports: Sequence[SettleReport]) -> tuple[Action, ...]:
    """Return what a rank tells whose state is of another course than the others'.

    Args:
        state: of the rank.
        reports: of all members.
    """
    assert state.plan is not None
    known = without_unmade(state.plan, sorted(reports, key=lambda r: r.index))
    _, others = of_one_course(state.plan, known)
    if state.index not in others:
        return ()
    return (_refused(state, "the forks in it are not those of the members that stayed"),)


def _refused(state: RankState, why: str) -> Action:
    assert state.plan is not None
    stage, inner = divmod(state.position, state.plan.ranks_per_stage)
    return SendFact(fact_of(state, StateRefused, stage=stage, inner=inner, evidence=why))
