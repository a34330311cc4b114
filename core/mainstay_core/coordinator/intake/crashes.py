"""Decides when the same exception has come back so often that the job fails with it.

Counted are tries: quorums in which the same exception ended a trainer at the same step. All
trainers that it ends in one quorum are one try, and so is a replica that takes a step over and
ends like the one before it. A commit of another step clears nothing, as a restart commits the steps
before the failing one again, each time. Only a commit of the step itself shows that it can be done.
"""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.ids import Slot
from mainstay_core.base.words import count
from mainstay_core.coordinator.causes import RepeatedCrash
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState, SlotState, with_slot
from mainstay_core.wire.crashes import Crash, ToldCrash
from mainstay_core.wire.facts import TrainerDown

MAX_KINDS = 16
"""Different crashes whose tries are counted; the one that came back longest ago goes first.
A program that fails in more ways than these at one step is stopped by its slots' restarts."""


def note_crash(
    state: CoordinatorState, slot: Slot, crash: Crash | None, at_s: float
) -> CoordinatorState:
    """Return the state with a crash noted; with an ``outcome`` if it came back too often.

    The same crash told again changes nothing.

    Args:
        state: of the job.
        slot: of the trainer.
        crash: what ended its program; None if it told nothing.
        at_s: when the end was observed.
    """
    if crash is None:
        return state
    state, tries = _count_try(state, crash)
    name = slot_name(state, slot)
    state = keep_newest(state, slot, crash, at_s, tries)
    limit = state.config.max_restarts
    # One try is no repetition, even of a job that wants no restarts: another replica may do it.
    if tries <= max(1, limit) or state.outcome:
        return state
    tried = f"{count(tries, 'try', 'tries')} of step {crash.step} ended with the same exception"
    outcome = f"{tried}, recovery.maxRestarts is {limit}; the last on {name}: {crash.describe()}"
    return replace(state, outcome=outcome)


def keep_newest(
    state: CoordinatorState, slot: Slot, crash: Crash | None, at_s: float, tries: int = 1
) -> CoordinatorState:
    """Return the state with a crash as the newest one, unless a newer one is known."""
    if crash is None or (state.crash is not None and state.crash.at_s > at_s):
        return state
    name = slot_name(state, slot)
    told = ToldCrash(crash=crash, trainer=name, at_s=at_s, times=max(1, tries))
    return state if told == state.crash else replace(state, crash=told)


def _count_try(state: CoordinatorState, crash: Crash) -> tuple[CoordinatorState, int]:
    """Return the state with a try counted, and the number of tries so far.

    A try before the first plan is not counted: no other trainer can take it over.
    """
    if crash.quorum is None or crash.step is None:
        return state, 0
    known = next((c for c in state.crashes if c.crash.is_like(crash)), None)
    if known is not None and crash.quorum.id <= known.last_id:
        return state, known.tries
    tries = 1 if known is None else known.tries + 1
    noted = RepeatedCrash(crash=crash, last_id=crash.quorum.id, tries=tries)
    others = [c for c in state.crashes if c is not known]
    return replace(state, crashes=(*others, noted)[-MAX_KINDS:]), tries


def explain_end(state: CoordinatorState, slot: SlotState, fact: TrainerDown) -> Transition:
    """Note why a trainer ended whose end is known."""
    if slot.incarnation is None and slot.ended[-1] == fact.incarnation:
        state = with_slot(state, replace(slot, why=fact.evidence, restarting=fact.restarting))
    message = f"trainer {slot_name(state, slot.slot)} had ended: {fact.evidence}"
    announced = Announce(code="TrainerDown", message=message, warning=True)
    return Transition(state=state, actions=(announced,), reason=message)


def forget_overcome(state: CoordinatorState) -> CoordinatorState:
    """Return the state after a commit: crashes at a step that is committed are overcome."""
    if all(c.crash.step is not None and c.crash.step >= state.step for c in state.crashes):
        return state
    left = [c for c in state.crashes if c.crash.step is not None and c.crash.step >= state.step]
    return replace(state, crashes=tuple(left))
