"""Notes how the checks of each stage are planned, as trainers tell it."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.events import Announce, Transition
from mainstay_core.coordinator.names import slot_name
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.settings import PlanName, StageChecks
from mainstay_core.wire.facts import Checks


def note_checks(state: CoordinatorState, fact: Checks, now_s: float) -> Transition:
    """Return the state with what a trainer has planned for its stage.

    The newest of a stage counts: its trainers differ in times alone.

    Raises:
        RemoteProtocolError: the job has no such stage.
    """
    del now_s
    if fact.stage >= state.shape.stages:
        raise RemoteProtocolError(
            f"Checks.stage: {fact.stage} is none of the job's {state.shape.stages}"
        )
    told = StageChecks(stage=fact.stage, plan=fact.plan, shares=fact.shares, reason=fact.evidence)
    before = {checks.stage: checks for checks in state.checks}
    known = before.get(fact.stage)
    stages = before | {fact.stage: told}
    state = replace(state, checks=tuple(stages[stage] for stage in sorted(stages)))
    name = slot_name(state, Slot(pod=fact.pod, index=fact.slot))
    message = f"checks of {told.describe()} (told by {name})"
    is_news = known is None or known.plan != told.plan
    warning = told.plan == PlanName.NAIVE
    announce = Announce(code="ChecksPlanned", message=message, warning=warning)
    return Transition(state=state, actions=(announce,) if is_news else (), reason=message)
