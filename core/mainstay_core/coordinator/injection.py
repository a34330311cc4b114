"""Decides which injected faults fire in spares, and records every fault that fires.

Faults on ranks fire where the ranks are (design 13.8). A spare runs no program, so this module
decides when its faults are due. A fault is recorded before it fires, so that it fires once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.coordinator.events import (
    Action,
    AddFaults,
    AddFired,
    Announce,
    FaultFired,
    FaultsRequested,
    Inject,
    Transition,
)
from mainstay_core.coordinator.names import pod_name
from mainstay_core.coordinator.siting import spare_pods
from mainstay_core.coordinator.state import CoordinatorState, FiredFault, all_settled, uid_of
from mainstay_core.faults.points import STEPS_TO_BE_OVER, FaultPoint, View


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStatus:
    """One fault of a job, and what became of it."""

    fault: FaultPoint
    state: str
    """``waiting``, ``fired``, ``missed`` (its step is over, and nothing was broken) or ``over``
    (the job is)."""
    fired: FiredFault | None = None
    problem: str = ""
    """Why a flip that fired changed nothing; empty: it did, or that is not known."""


def list_faults(state: CoordinatorState) -> tuple[FaultStatus, ...]:
    """Return all faults of a job, in the order in which the job was given them."""
    fired, missed = {f.fault: f for f in state.fired}, dict(state.missed)
    return tuple(
        FaultStatus(
            fault=fault,
            state="missed" if fault.id in missed else _state_of(fault, state, fired),
            fired=fired.get(fault.id),
            problem=missed.get(fault.id, ""),
        )
        for fault in state.config.faults
    )


def _state_of(fault: FaultPoint, state: CoordinatorState, fired: dict[str, FiredFault]) -> str:
    if fault.id in fired:
        return "fired"
    if state.terminal:
        return "over"
    relative = fault.soon or fault.during or fault.beside
    if fault.replica is not None and not relative and fault.step < state.step:
        return "missed"
    return "waiting"


def request_faults(state: CoordinatorState, event: FaultsRequested, now_s: float) -> Transition:
    """Return the state with further faults. A fault that the job already has changes nothing.

    Raises:
        RemoteProtocolError: it has another fault of that id.
    """
    del now_s
    known = {fault.id: fault for fault in state.config.faults}
    for fault in event.faults:
        if known.get(fault.id, fault) != fault:
            raise RemoteProtocolError(f"the job has another fault {fault.id}")
    new = tuple(fault for fault in event.faults if fault.id not in known)
    if not new:
        return Transition(state=state, reason="the job has these faults already")
    config = replace(state.config, faults=(*state.config.faults, *new))
    message = f"to be injected: {', '.join(fault.id for fault in new)}"
    actions = (AddFaults(faults=new), Announce(code="FaultsAdded", message=message))
    return Transition(state=replace(state, config=config), actions=actions, reason=message)


def record_fired(state: CoordinatorState, event: FaultFired, now_s: float) -> Transition:
    """Return the state with a fault fired.

    It fires once; the process that was allowed may ask again.

    Raises:
        RemoteProtocolError: the job has no such fault, or it has fired elsewhere.
    """
    del now_s
    if all(f.id != event.fault for f in state.config.faults):
        raise RemoteProtocolError(f"the job has no fault {event.fault}")
    fired = FiredFault(
        fault=event.fault,
        pod=event.pod,
        slot=event.slot,
        rank=event.rank,
        at_s=event.at_s,
        step=state.step,
    )
    known = next((f for f in state.fired if f.fault == event.fault), None)
    if known is not None:
        if (known.pod, known.slot, known.rank) == (fired.pod, fired.slot, fired.rank):
            return Transition(state=state, reason=f"fault {event.fault} was allowed before")
        raise RemoteProtocolError(f"fault {event.fault} has already fired on {known.pod}")
    where = pod_name(state, event.pod)
    where = where if event.slot is None else f"{where}/{event.slot}"
    who = f" ({event.rank})" if event.rank else ""
    message = f"injected fault {event.fault} fires on {where}{who}"
    return Transition(
        state=replace(state, fired=(*state.fired, fired)),
        actions=(
            AddFired(fault=event.fault),
            Announce(code="FaultInjected", message=message, warning=True),
        ),
        reason=message,
    )


def inject_into_spares(state: CoordinatorState) -> Transition:
    """Return the state and the actions that hand due faults on spares to their pods."""
    due = [
        fault
        for fault in state.config.faults
        if fault.spare is not None and fault.id not in state.injected
    ]
    if not due:
        return Transition(state=state)
    view = view_of(state)
    actions: list[Action] = []
    injected = list(state.injected)
    for fault in due:
        if not fault.is_due(state.step, view):
            continue
        injected.append(fault.id)
        spares = spare_pods(state)
        assert fault.spare is not None
        if fault.spare < len(spares):
            actions.append(Inject(fault=fault, pod=uid_of(spares[fault.spare])))
        else:
            message = f"fault {fault.id}: there is no spare {fault.spare}, only {len(spares)}"
            actions.append(Announce(code="FaultWithoutTarget", message=message, warning=True))
    if not actions:
        return Transition(state=state)
    return Transition(state=replace(state, injected=tuple(injected)), actions=tuple(actions))


def view_of(state: CoordinatorState) -> View:
    """Return what decides when a fault is due, as far as the coordinator knows it."""
    plan = state.plan
    over = (f.fault for f in state.fired if state.step >= f.step + STEPS_TO_BE_OVER)
    return View(
        fired=plan.faults_fired if plan else (),
        over=tuple(over),
        planned=plan is None or plan.planned,
        whole=plan is not None and len(plan.chains) >= state.wanted and all_settled(state),
    )
