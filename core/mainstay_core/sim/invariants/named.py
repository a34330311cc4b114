"""Checks that a device which was named leaves, and that its steps are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mainstay_core.base.ids import Slot
from mainstay_core.coordinator.state import CoordinatorState
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.sim.engine import Violation
from mainstay_core.sim.invariants.life import Life
from mainstay_core.wire.facts import Named

STEPS_TO_LEAVE = 20
"""Steps after which a device that was named serves no more, whatever was lost meanwhile."""


class NamedDevices:
    """The devices that were named as wrong each time, and in which step they were first."""

    def __init__(self) -> None:
        self._steps: dict[Slot, int] = {}

    def note(self, trainer: Life, verdict: Verdict) -> None:
        """The votes have named a device."""
        if verdict is Verdict.DETERMINISTIC:
            self._steps.setdefault(trainer.state.slot, trainer.state.version)

    def check(
        self,
        state: CoordinatorState,
        told: Iterable[Named],
        num_steps: int,
        seen: Counter[str],
    ) -> None:
        """The job is complete, whatever the store has lost meanwhile; raises Violation.

        Args:
            state: of the job.
            told: words that supervisors who live remember, and have told since the store lost them:
                also of devices that ended before they could tell of themselves.
            num_steps: of the job.
            seen: what happened how often.
        """
        tainted = {taint.slot for taint in state.taints}
        members = {m.slot for m in state.plan.members} if state.plan is not None else set()
        for fact in told:
            seen["named by another at the end"] += fact.device is not None
            if fact.since is not None and fact.named not in tainted:
                raise Violation(
                    f"I8: {fact.pod} has told that {fact.named} was named in step {fact.step}, and "
                    "it tainted nothing"
                )
        for slot, step in self._steps.items():
            seen["named at the end"] += 1
            if slot not in tainted:
                raise Violation(f"I8: {slot} was named in step {step}, and tainted nothing")
            if slot in members and num_steps - step >= STEPS_TO_LEAVE:
                raise Violation(f"I8: {slot} was named in step {step}, and serves at the end")
