"""Says how many cells guard what an end of the pipeline alone has, and refuses what cannot be."""

from __future__ import annotations

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import count
from mainstay_core.job.config import SWAPPED_GUARDS
from mainstay_core.job.sections import RecoveryPolicy


def resolve_guards(recovery: RecoveryPolicy, shape: JobShape, *, snapshots: bool) -> int:
    """Return the guards of each end; fewer serve while the stage beside it has fewer cells.

    Args:
        recovery: of the job.
        shape: of the job.
        snapshots: whether pods keep some in memory: then there are guards only where they are
            asked for, as the number cannot change in a job that exists.
    """
    guards = recovery.approximate.guards
    if guards is not None:
        return guards
    may = shape.ranks_per_stage == 1 and shape.order is Order.SWAPPED and not snapshots
    return SWAPPED_GUARDS if may else 0


def check_guards(recovery: RecoveryPolicy, shape: JobShape) -> None:
    """Refuse guards where they would be of no use, or not yet; arguments likewise.

    Raises:
        InvalidSpecError: names the field and what would be right.
    """
    # The number of guards cannot change, and that of replicas can.
    guards, cells = recovery.approximate.guards, shape.lanes
    if not guards:
        return
    wrong = ""
    if shape.order is Order.IN_ORDER:
        wrong = "in order no stage is an end's twin, from which its layers could be made anew; use "
        wrong += "0, or pipeline.order Swapped"
    elif shape.ranks_per_stage > 1:
        wrong = "nobody guards what several ranks of a stage share in this version; use 0, or "
        wrong += "parallelism.ranksPerStage 1"
    elif guards > cells:
        have = count(cells, "lane")
        wrong = f"the job has {have}, so the stage beside an end never has more cells; use at most "
        wrong += str(cells)
    if wrong:
        raise InvalidSpecError("spec.recovery.approximate.guards", f"is {guards}, but {wrong}")


def check_two_ends(recovery: RecoveryPolicy, shape: JobShape, *, snapshots: bool) -> None:
    """Refuse permission in two stages that are both ends and get no guards, so that neither is made
    anew. Whoever writes guards 0 says that neither has what the other lacks; arguments likewise.

    Raises:
        InvalidSpecError: names the field and what would be right.
    """
    how = recovery.approximate
    if not recovery.allow_approximate or how.guards is not None or how.stale_steps is not None:
        return
    if shape.stages != 2 or shape.order is Order.IN_ORDER:
        return
    if resolve_guards(recovery, shape, snapshots=snapshots):
        return
    if shape.ranks_per_stage == 1:
        raise InvalidSpecError(
            "spec.recovery.allowApproximate",
            "is true, but with snapshots there are no guards unless they are asked for, so neither "
            "of the 2 stages could be made anew; set approximate.guards (2, or 0 if no stage has a "
            "kind of block that the other lacks), or use false",
        )
    raise InvalidSpecError(
        "spec.recovery.allowApproximate",
        "is true, but with several ranks to a stage nobody guards what each of the 2 stages alone "
        "has (embedding, head), so neither could be made anew; use false, or more stages, or "
        "checkpoints (checkpoint.everySteps) and approximate.staleSteps, or "
        "parallelism.ranksPerStage 1, or approximate.guards 0 if no stage has a kind of block that "
        "the other lacks",
    )
