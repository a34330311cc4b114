"""The check that nobody goes on from steps or checkpoints that count no more."""

from __future__ import annotations

from collections import Counter

from mainstay_core.rank.settle import Settlement, StateAction
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.invariants.holding import hold
from mainstay_core.wire.plan import Plan, is_void


def check_not_void(plan: Plan, outcome: Settlement, disk: Disk, seen: Counter[str]) -> None:
    """Check that nobody goes on from steps that count no more; raises Violation."""
    for one in plan.voided[-1:]:
        begins = one.quorum == plan.quorum.id
        seen["went back"] += begins
        hold(
            not begins or outcome.version <= one.version,
            f"I8: {plan.quorum} goes on from step {outcome.version}, which is tainted",
        )
    if StateAction.LOAD in outcome.actions and outcome.version:
        lineage = disk.lineages.get(outcome.version, 0)
        hold(
            not is_void(plan.voided, outcome.version, lineage),
            f"I8: {plan.quorum} loads the checkpoint of step {outcome.version}, which is void",
        )
