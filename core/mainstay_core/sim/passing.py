"""Plans from supervisor to supervisor, and what one holds for a store that has lost it.

``mainstay_agent.gossip`` and ``mainstay_agent.held_plan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.events import PlanReported
from mainstay_core.sim.gather import Holds, Passed
from mainstay_core.sim.network import End
from mainstay_core.supervisor.events import SlotPhase, SupervisorState
from mainstay_core.wire.plan import Plan

if TYPE_CHECKING:
    from mainstay_core.sim.line import ApiLine

OFFER_AFTER_S = 0.25
OFFER_TIMEOUT_S = 2.0


class Passing:
    """One supervisor's part in handing plans round."""

    def __init__(self, supervisor: ApiLine) -> None:
        self._supervisor = supervisor
        self._plan: Plan | None = None

    def hold(self, plan: Plan) -> None:
        """A newer plan is held from now on: see that others get it."""
        self._plan = plan
        delay_s = OFFER_AFTER_S if self._supervisor.stands else 0.0
        self._supervisor.after(delay_s, self._pass_on, plan)

    def _pass_on(self, plan: Plan) -> None:
        if plan is self._plan:
            self.offer()

    def offer(self) -> None:
        """Compare with the neighbours."""
        if self._plan is not None:
            for address in self._plan.neighbours(self._supervisor.pod):
                self._talk(address, self._plan)

    def _talk(self, address: str, plan: Plan) -> None:
        supervisor = self._supervisor

        def opened(end: End) -> None:
            def answered(answer: Any) -> None:
                if isinstance(answer, Holds):
                    end.send(Passed(plan))
                elif answer.plan is not None:
                    supervisor.passed(answer.plan)
                    end.close()
                else:
                    end.close()

            end.on_message = answered
            end.send(Holds(plan.quorum))
            supervisor.after(OFFER_TIMEOUT_S, end.close)

        supervisor.world.network.connect(supervisor, address, opened, _ignore, OFFER_TIMEOUT_S)


def restoration_of(state: SupervisorState) -> PlanReported | None:
    """Return what a supervisor tells a store that has lost the job; None without a plan."""
    plan = state.plan
    if plan is None:
        return None
    steps = [
        slot.status.step
        for slot in state.slots
        if slot.phase is SlotPhase.UP
        and slot.status is not None
        and slot.incarnation is not None
        and plan.member_of(Slot(pod=state.pod, index=slot.index), slot.incarnation) is not None
    ]
    return PlanReported(pod=state.pod, plan=plan, step=max(steps, default=0), fingerprint={})


def _ignore(why: str) -> None:
    del why
