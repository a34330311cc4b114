"""The job as a supervisor holds it, for a store that has lost it (protocol section 9)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mainstay_core.base.ids import Slot
from mainstay_core.faults.points import FaultPoint
from mainstay_core.supervisor.state import SlotPhase, SupervisorState
from mainstay_core.wire.api import HeldJob, Registration


def held_job_of(
    state: SupervisorState,
    registered: Registration | None,
    faults: tuple[FaultPoint, ...] = (),
    fired: Collection[str] = (),
    approximate_since: int | None = None,
) -> HeldJob | None:
    """Return what to tell an api that has lost the job; None if there is nothing to tell.

    A job that has ended is not told: its end must not be undone.

    Args:
        state: the pod.
        registered: what the api answered when it last knew the job; None if it never did.
        faults: injected faults, those included that came while the job ran.
        fired: those that were carried out here.
        approximate_since: since which step the newest ledger entry says that the job is so.
    """
    if registered is None or state.ending:
        return None
    plan = state.plan
    members = [
        slot
        for slot in state.slots
        if slot.phase is SlotPhase.UP
        and plan is not None
        and slot.incarnation is not None
        and plan.member_of(Slot(pod=state.pod, index=slot.index), slot.incarnation) is not None
    ]
    fingerprints = [slot.up.fingerprint for slot in members if slot.up is not None]
    return HeldJob(
        pod=state.pod,
        config=replace(registered.config, faults=faults),
        manifest=registered.manifest,
        plan=plan,
        step=max((slot.status.step for slot in members if slot.status is not None), default=0),
        fingerprint=next((f for f in fingerprints if f), None),
        fired=tuple(sorted(fired)),
        approximate_since=approximate_since,
    )
