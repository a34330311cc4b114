"""Notes which injected flips changed nothing, as the trainers tell it that were to put them in."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.bounds import cut
from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Missed

MAX_PROBLEM = 500
"""Characters that the state keeps of what a trainer says of a flip. A job may have thousands."""


def note_missed(state: CoordinatorState, fact: Missed, now_s: float) -> Transition:
    """Return the state with a flip that was not put in.

    The trainer on which it fired alone knows that: a fault is recorded before it fires.
    """
    del now_s
    if not any(fault.id == fact.fault and fault.flip for fault in state.config.faults):
        # As in a store that lost the job: it is no reason to refuse what is told beside it.
        return Transition(state=state, reason=f"the job has no flip {fact.fault}")
    if fact.fault in dict(state.missed):
        return Transition(state=state, reason=f"flip {fact.fault}: that is known")
    name = slot_name(state, Slot(pod=fact.pod, index=fact.slot))
    if not any((f.fault, f.pod, f.slot) == (fact.fault, fact.pod, fact.slot) for f in state.fired):
        return Transition(state=state, reason=f"flip {fact.fault} has not fired on {name}")
    problem = cut(fact.evidence, MAX_PROBLEM)
    message = f"injected fault {fact.fault} changed nothing on {name}: {problem}"
    return Transition(
        state=replace(state, missed=(*state.missed, (fact.fault, problem))),
        actions=(Announce(code="FaultMissed", message=message, warning=True),),
        reason=message,
    )
