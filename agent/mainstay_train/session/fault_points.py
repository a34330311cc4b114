"""Fires injected faults exactly at a named action of the program.

The trainer halts there and tells its supervisor, which records the fault and
then carries it out; so the place is exact, whatever the machine's load (design
13.8). Slowness and flips are the trainer's own to carry out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable

from mainstay_core.faults.points import (
    COMPUTE,
    OWN_ACTIONS,
    STEPS_TO_BE_OVER,
    FaultAction,
    FaultPoint,
    View,
)
from mainstay_core.planning.program import Action, Op
from mainstay_core.wire.plan import Plan
from mainstay_train.session.uplink import Uplink

logger = logging.getLogger(__name__)


class FaultPoints:
    """The faults of a job, as one trainer meets them.

    Args:
        faults: all faults of the job that are known now; :meth:`add` takes later ones.
        num_replicas: that the job wants, unless the plan says it: with so many chains it is whole.
        uplink: where reaching one is told.
        flip: called with a flip that fires, and with its step.
    """

    def __init__(
        self,
        faults: Iterable[FaultPoint],
        num_replicas: int,
        uplink: Uplink,
        flip: Callable[[FaultPoint, int], None] = lambda *_: None,
    ) -> None:
        self._flip = flip
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._stuck: set[str] = set()
        """Flips that were put in here, not to be put in again."""
        self._waiting: list[FaultPoint] = []
        self._num_replicas = num_replicas
        self._uplink = uplink
        self._fired_at: dict[str, int | None] = {}
        """Faults that fired since the plan, with the step in which that was first noticed."""
        self._slow: list[tuple[FaultPoint, int]] = []
        """What makes this rank slow, with the step in which that ends."""
        self._computing_since_s: float | None = None
        self.add(faults)

    def add(self, faults: Iterable[FaultPoint], sticky: Collection[str] = ()) -> None:
        """Take note of faults (any thread); those that are known already change nothing.

        Args:
            faults: of the job.
            sticky: ids of those that have fired in this slot, and stay in its device: also in that
                of a trainer that was forked later.
        """
        faults = tuple(faults)
        with self._lock:
            new = [fault for fault in faults if fault.id not in self._known]
            self._known.update(fault.id for fault in new)
            self._waiting += new
            stuck = [f for f in faults if f.id in sticky and f.id not in self._stuck]
            self._stuck.update(fault.id for fault in stuck)
        for fault in stuck:
            self._flip(fault, 0)

    def note_fired(self, fault: str) -> None:
        """A fault fires, here or elsewhere (any thread)."""
        with self._lock:
            self._fired_at.setdefault(fault, None)

    def reach(self, plan: Plan, index: int, step: int, action: Action) -> None:
        """Fire the faults of this action; returns unless one kills this process.

        May be called by the thread that runs the program, and by those that serve others.
        """
        if action.op is not Op.SERVE:
            self._drag(step, action)
        self._fire_due(plan, index, step, action)

    def _fire_due(self, plan: Plan, index: int, step: int, action: Action) -> None:
        if not self._waiting:
            return
        rank = plan.members[index].rank
        for fault in self._due(plan, index, step, action):
            self._fire(fault, str(rank), step)

    def in_background(self, plan: Plan, index: int, step: int) -> Callable[[Op], None]:
        """Return what a writing thread calls before its actions: as of the order that it got.

        Who computes calls it before what happens inside of an action.
        """
        stage = plan.members[index].rank.stage
        # What the main thread computes meanwhile is as slow as before.
        return lambda op: self._fire_due(plan, index, step, Action(op, stage))

    def _due(self, plan: Plan, index: int, step: int, action: Action) -> list[FaultPoint]:
        rank, op = plan.members[index].rank, action.op.value
        with self._lock:
            view = View(
                fired=plan.faults_fired,
                over=self._over(step),
                planned=plan.planned,
                whole=len(plan.chains) >= (plan.replicas_wanted or self._num_replicas),
            )
            waiting = [fault for fault in self._waiting if fault.id not in plan.faults_fired]
            due = [fault for fault in waiting if fault.matches(step, rank, op, view)]
            self._waiting = [fault for fault in waiting if fault not in due]
        return due

    def _over(self, step: int) -> tuple[str, ...]:
        """Return the faults that fired some steps ago; not all of them lead to a plan."""
        for fault, since in self._fired_at.items():
            # A rank that goes back to an earlier step counts anew.
            self._fired_at[fault] = step if since is None else min(since, step)
        return tuple(
            fault
            for fault, since in self._fired_at.items()
            if since is not None and step >= since + STEPS_TO_BE_OVER
        )

    def _fire(self, fault: FaultPoint, rank: str, step: int) -> None:
        logger.warning("injected fault %s: %s of %s at step %d", fault.id, fault.action, rank, step)
        head = {
            "fault": fault.id,
            "action": fault.action.value,
            "delay_ms": fault.delay_ms,
            "for_s": fault.for_s,
            "step": step,
            "rank": rank,
        }
        if fault.action is FaultAction.SLOW:
            self._slow.append((fault, step + fault.num_steps))
        if fault.action is FaultAction.FLIP:
            with self._lock:
                self._stuck.add(fault.id)
            self._flip(fault, step)
        own = fault.action in OWN_ACTIONS
        self._uplink.reach_fault(head, halt=not own and fault.delay_ms == 0)

    def _drag(self, step: int, action: Action) -> None:
        """Make the action that has just ended take as long as on a slow rank."""
        if not self._slow:
            return
        since_s, now_s = self._computing_since_s, time.monotonic()
        self._slow = [(fault, end) for fault, end in self._slow if step < end]
        if since_s is not None:
            # Only computing counts: waiting for others is not what a slow rank is slow in.
            took_s = now_s - since_s
            for fault, _ in self._slow:
                time.sleep(fault.slow_ms / 1000 + (fault.factor - 1) * took_s)
        computes = action.op.value in COMPUTE
        self._computing_since_s = time.monotonic() if computes else None
