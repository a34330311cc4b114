"""Counts the training that a job gets done: first commits, and the share of the time they took.

ETTR is the time of the steps that were committed for the first time, divided by the time since the
first plan. Each step counts as a median step. So stalls, repeated steps and restarts lower it. It
is taken at the newest commit and kept in the job's state: every replica of the api tells the same.
"""

from __future__ import annotations

from mainstay_core.base.values import replace
from mainstay_core.coordinator.events import StepsCommitted
from mainstay_core.coordinator.lineage import note_course
from mainstay_core.coordinator.state import (
    MAX_STEP_SECONDS,
    CoordinatorState,
    LastCommit,
    Progress,
    median,
)
from mainstay_core.wire.plan import Method


def begin_progress(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state in which the job's time begins to count, as its first plan is made."""
    return replace(state, started_at_s=now_s, progress=Progress(), last_commit=None)


def note_commit(state: CoordinatorState, event: StepsCommitted) -> CoordinatorState:
    """Return the state with a commit counted, and its duration among the newest ones.

    A commit of a later step shows that the steps before it are committed, so it counts them too,
    and they count once.
    """
    state = replace(state, step_seconds=(*state.step_seconds, event.step_s)[-MAX_STEP_SECONDS:])
    before = _counted_before(state, event)
    new = max(0, event.step + 1 - before)
    if new and not state.started_at_s:
        state = begin_progress(state, event.committed_at_s - event.step_s)
    steps = state.progress.steps + new
    step_s = median(state.step_seconds)
    # Of the first steps some warm up. Their median is right only once there are more of the others,
    # so these steps are weighed anew with each of them.
    weighed = steps <= MAX_STEP_SECONDS
    useful_s = steps * step_s if weighed else state.progress.useful_s + new * step_s
    state = replace(
        state,
        furthest=max(before, event.step + 1),
        progress=Progress(steps=steps, useful_s=useful_s),
    )
    known = state.last_commit
    # A commit that is told late is not the newest, nor is one from before a suspension.
    if event.committed_at_s < (known.at_s if known is not None else state.started_at_s):
        return state
    newest = LastCommit(
        step=event.step,
        quorum_id=event.quorum.id,
        at_s=event.committed_at_s,
        loss=event.loss,
    )
    return note_course(replace(state, last_commit=newest), event)


def _counted_before(state: CoordinatorState, event: StepsCommitted) -> int:
    """Return the number of steps that were committed before, in this run or an earlier one."""
    before = state.furthest
    if not state.started_at_s:
        # The store was recovered: what was counted before is not known.
        before = max(before, event.step)
    if state.plan is not None and state.plan.method is Method.START:
        # A run that goes on from an earlier one's checkpoint begins with the steps of that.
        before = max(before, state.settled_step or 0)
    return before


def lateness_s(state: CoordinatorState, event: StepsCommitted) -> float | None:
    """Return how much later than normal a commit comes, by the ledger's times alone.

    A normal one comes a median step after the commit before.

    Args:
        state: before the commit is noted.
        event: the commit.

    Returns:
        Seconds; None for the first commit.
    """
    last = state.last_commit
    if last is None:
        return None
    normal_s = max(1, event.step - last.step) * median(state.step_seconds)
    return max(0.0, event.committed_at_s - last.at_s - normal_s)


def find_ettr(state: CoordinatorState) -> float | None:
    """Return the job's effective training time ratio as of its newest commit; None before it."""
    if state.last_commit is None or not state.progress.steps:
        return None
    passed_s = state.last_commit.at_s - state.started_at_s
    return min(1.0, state.progress.useful_s / passed_s) if passed_s > 0 else None
