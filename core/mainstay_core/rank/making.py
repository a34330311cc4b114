"""Says what a rank does to make a stage anew, as a settlement orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.rank.forks.makers import Making, plan_making
from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.rank.state import RankState
from mainstay_core.wire.votes import SettleReport


def forked(state: RankState, outcome: Settlement) -> RankState:
    """Return a state at the version of a fork, which is the same with and without it."""
    return replace(state, history=outcome.history, commit_chain=outcome.commit_chain)


def missed_fork(state: RankState, outcome: Settlement) -> bool:
    """Return whether the course has made other positions anew at the version of this rank's state.

    Its plan need not order a fork: those who made it may have settled in an older one.
    """
    return outcome.history not in ((), state.history)


def making_of(state: RankState, outcome: Settlement, reports: Sequence[SettleReport]) -> Making:
    """Return of what this rank makes its stage, and who has what it takes."""
    assert state.plan is not None
    assert outcome.fork is not None
    having = (StateAction.STAY, StateAction.ROLL)
    holders = {
        position: [
            m.index for action in having for m in members if outcome.actions[m.index] is action
        ]
        for position, members in enumerate(state.plan.positions)
    }
    made = state.plan, outcome.fork, state.index, holders, reports
    return plan_making(*made, outcome.guards, outcome.history)
