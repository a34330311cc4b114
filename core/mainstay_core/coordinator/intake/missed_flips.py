"""Notes which injected flips changed nothing, as the trainers tell it that were to put them in."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.wire.facts import Missed


def note_missed(state: CoordinatorState, fact: Missed, now_s: float) -> Transition:
    """Return the state with a flip that was not put in; who told it first is believed."""
    del now_s
    if not any(fault.id == fact.fault and fault.flip for fault in state.config.faults):
        # As in a store that lost the job: it is no reason to refuse what is told beside it.
        return Transition(state=state, reason=f"the job has no flip {fact.fault}")
    if fact.fault in dict(state.missed):
        return Transition(state=state, reason=f"flip {fact.fault}: that is known")
    name = slot_name(state, Slot(pod=fact.pod, index=fact.slot))
    message = f"injected fault {fact.fault} changed nothing on {name}: {fact.evidence}"
    return Transition(
        state=replace(state, missed=(*state.missed, (fact.fault, fact.evidence))),
        actions=(Announce(code="FaultMissed", message=message, warning=True),),
        reason=message,
    )
