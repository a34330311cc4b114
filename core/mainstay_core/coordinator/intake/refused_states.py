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


def note_refused(state: CoordinatorState, fact: StateRefused, now_s: float) -> Transition:
    """Return the state with what a trainer tells of its own state: it does not count.

    A pod that was cut off while its stage was made anew brings the true state back. It is told
    once, in a job that has forked: where all go back no state counts, and nobody has come too late.

    Raises:
        RemoteProtocolError: the job has no such stage or inner rank.
    """
    shape = state.shape
    for name, number, most in (
        ("stage", fact.stage, shape.stages),
        ("inner", fact.inner, shape.ranks_per_stage),
    ):
        if number >= most:
            raise RemoteProtocolError(f"StateRefused.{name}: {number} is none of the job's {most}")
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
    if not _has_forked(state) or any(_is_same(known, refused) for known in state.refused_states):
        return Transition(state=state, reason=message)
    kept = (*state.refused_states, refused)[-MAX_REFUSED_STATES:]
    return Transition(
        state=replace(state, refused_states=kept),
        actions=(Announce(code="StateRefused", message=message),),
        reason=message,
    )


def _has_forked(state: CoordinatorState) -> bool:
    is_ordered = state.plan is not None and state.plan.fork is not None
    return is_ordered or state.approximate_since is not None


def _is_same(known: RefusedState, told: RefusedState) -> bool:
    """Return whether a state is known: a fact may come twice, and later by another name."""
    return replace(told, trainer=known.trainer, reason=known.reason, at_s=known.at_s) == known
