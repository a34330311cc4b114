"""Where injected faults fire: exactly at a named action of the program.

The trainer halts there and tells its supervisor, which records the fault and
then kills; so the place is exact, whatever the machine's load (design 13.8).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from mainstay_core.faults import FaultAction, FaultPoint
from mainstay_core.messages import Plan
from mainstay_core.program import Action
from mainstay_train.uplink import Uplink

logger = logging.getLogger(__name__)


class FaultPoints:
    """The faults of a job, as one trainer meets them.

    Args:
        faults: all faults of the job.
        uplink: where reaching one is told.
    """

    def __init__(self, faults: Sequence[FaultPoint], uplink: Uplink) -> None:
        self._waiting = list(faults)
        self._uplink = uplink

    def reach(self, plan: Plan, index: int, step: int, action: Action) -> None:
        """Fire the faults of this action; returns unless one kills this process."""
        if not self._waiting:
            return
        rank = plan.members[index].rank
        for fault in tuple(self._waiting):
            if fault.id in plan.faults_fired:
                self._waiting.remove(fault)
            elif fault.matches(step, rank, action.op.value):
                self._waiting.remove(fault)
                self._fire(fault, str(rank), step)

    def _fire(self, fault: FaultPoint, rank: str, step: int) -> None:
        logger.warning("injected fault %s: %s of %s at step %d", fault.id, fault.action, rank, step)
        slow = fault.action is FaultAction.SLOW
        head = {
            "fault": fault.id,
            "action": fault.action.value,
            "delay_ms": fault.delay_ms,
            "step": step,
            "rank": rank,
        }
        self._uplink.reach_fault(head, halt=not slow and fault.delay_ms == 0)
        if slow:
            time.sleep(fault.delay_ms / 1000)
