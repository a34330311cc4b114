"""The plan that a supervisor holds, kept for a store that has lost the job (protocol section 9)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from mainstay_agent.api_client import Registration
from mainstay_core.base import codec
from mainstay_core.base.ids import Slot
from mainstay_core.faults.points import FaultPoint
from mainstay_core.supervisor.events import SlotPhase, SupervisorState


def restoration_of(
    state: SupervisorState,
    registered: Registration,
    faults: tuple[FaultPoint, ...],
    fired: Collection[str],
) -> dict[str, Any]:
    """Return the body of the api's route ``restore``.

    Args:
        state: the pod.
        registered: what the api answered when it last knew the job.
        faults: injected faults, those included that came while the job ran.
        fired: those that were carried out here.
    """
    plan = state.plan
    up = [slot for slot in state.slots if slot.phase is SlotPhase.UP]
    members = [
        slot
        for slot in up
        if plan is not None
        and slot.incarnation is not None
        and plan.member_of(Slot(pod=state.pod, index=slot.index), slot.incarnation) is not None
    ]
    fingerprints = [slot.up.fingerprint for slot in members if slot.up is not None]
    return {
        "pod": state.pod,
        "config": codec.encode(replace(registered.config, faults=faults)),
        "manifest": registered.manifest,
        "plan": None if plan is None else codec.encode(plan),
        "step": max((slot.status.step for slot in members if slot.status is not None), default=0),
        "fingerprint": next((f for f in fingerprints if f), None),
        "fired": sorted(fired),
    }
