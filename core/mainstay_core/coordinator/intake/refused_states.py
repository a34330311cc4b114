"""Notes which states came back after a job had gone on without them, and were refused."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import StateRefused
from mainstay_core.wire.reinitialisation import MAX_REFUSED_STATES, RefusedState

MORE_STATES = 64
"""Refused states that are known beyond one of each place, so that no life tells of one twice. Only
the newest, which people are shown, are kept with why they do not count."""


def note_refused(state: CoordinatorState, fact: StateRefused, now_s: float) -> Transition:
    """Return the state with what a trainer tells of its own state: it does not count.

    A pod that was cut off while its stage was made anew brings the true state back. It is told
    once, in a job that has forked: where all go back no state counts, and nobody has come too late.

    It is known by the trainer's life and the place, whatever else is said of it: what a life tells
    again of a place is no news, or it could be told without end.

    Raises:
        RemoteProtocolError: the job has no such stage, inner rank or number of steps.
    """
    shape = state.shape
    for name, number, most in (
        ("stage", fact.stage, shape.stages),
        ("inner", fact.inner, shape.ranks_per_stage),
    ):
        if number >= most:
            raise RemoteProtocolError(f"StateRefused.{name}: {number} is none of the job's {most}")
    if (fact.step or 0) > shape.steps:
        raise RemoteProtocolError(
            f"StateRefused.step: {fact.step} is more than the job's {shape.steps}"
        )
    several = shape.ranks_per_stage > 1
    place = f"inner rank {fact.stage}.{fact.inner}" if several else f"stage {fact.stage}"
    refused = RefusedState(
        trainer=slot_name(state, Slot(pod=fact.pod, index=fact.slot)),
        incarnation=fact.incarnation,
        place=place,
        step=fact.step or 0,
        reason=fact.evidence,
        at_s=fact.observed_at_s or now_s,
    )
    message = refused.describe()
    known = state.refused_states
    if not _has_forked(state) or any(_is_same(each, refused) for each in known):
        return Transition(state=state, reason=message)
    kept = (*known, refused)[-shape.stages * shape.ranks_per_stage - MORE_STATES :]
    old = tuple(replace(each, reason="") for each in kept[:-MAX_REFUSED_STATES])
    kept = old + kept[-MAX_REFUSED_STATES:]
    return Transition(
        state=replace(state, refused_states=kept),
        actions=(Announce(code="StateRefused", message=message),),
        reason=message,
    )


def _has_forked(state: CoordinatorState) -> bool:
    is_ordered = state.plan is not None and state.plan.fork is not None
    return is_ordered or state.approximate_since is not None


def _is_same(known: RefusedState, told: RefusedState) -> bool:
    return (known.incarnation, known.place) == (told.incarnation, told.place)
