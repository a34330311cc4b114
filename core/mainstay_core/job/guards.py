"""Says how many cells guard what an end of the pipeline alone has, and refuses what cannot be."""

from __future__ import annotations

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.job.approximation import loads_alone
from mainstay_core.job.config import SWAPPED_GUARDS
from mainstay_core.job.sections import RecoveryPolicy
from mainstay_core.job.sentences import (
    GUARDS_IN_ORDER,
    GUARDS_OF_SEVERAL_RANKS,
    TOO_MANY_GUARDS,
    TWO_ENDS_BESIDE_SNAPSHOTS,
    TWO_ENDS_OF_SEVERAL_RANKS,
)


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
        wrong = GUARDS_IN_ORDER
    elif shape.ranks_per_stage > 1:
        wrong = GUARDS_OF_SEVERAL_RANKS
    elif guards > cells:
        wrong = f"{TOO_MANY_GUARDS}: {cells}"
    if wrong:
        raise InvalidSpecError("spec.recovery.approximate.guards", f"is {guards}, but {wrong}")


def check_two_ends(recovery: RecoveryPolicy, shape: JobShape, *, snapshots: bool) -> None:
    """Refuse permission in two stages that are both ends and get no guards, so that neither is made
    anew. Whoever writes guards 0 says that neither has what the other lacks; arguments likewise.

    Raises:
        InvalidSpecError: names the field and what would be right.
    """
    if not recovery.allow_approximate or recovery.approximate.guards is not None:
        return
    if loads_alone(recovery, shape.checkpoint_every_steps):
        return
    if shape.stages != 2 or shape.order is Order.IN_ORDER:
        return
    if resolve_guards(recovery, shape, snapshots=snapshots):
        return
    several = shape.ranks_per_stage > 1
    why = TWO_ENDS_OF_SEVERAL_RANKS if several else TWO_ENDS_BESIDE_SNAPSHOTS
    raise InvalidSpecError("spec.recovery.allowApproximate", f"is true, but {why}")
