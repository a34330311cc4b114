"""Checks what a TrainingJob says of approximate recovery, and derives the rules from it."""

from __future__ import annotations

from dataclasses import replace

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.config import STALE_STEPS, ApproximateConfig
from mainstay_core.job.sections import Checkpoint, RecoveryPolicy
from mainstay_core.job.sentences import (
    STALE_WITHOUT_CHECKPOINTS,
    no_neighbours,
)
from mainstay_core.job.sizes.rank_sizes import Made


def approximate_config(
    recovery: RecoveryPolicy, checkpoint: Checkpoint
) -> ApproximateConfig | None:
    """Return the rules by which stages may be made anew; None: they may not."""
    return _rules_of(recovery, checkpoint) if recovery.allow_approximate else None


def permitted_config(recovery: RecoveryPolicy, checkpoint: Checkpoint) -> ApproximateConfig | None:
    """Return the rules of a recovery that a person allows where the policy does not.

    None: they are the defaults, or the policy allows all recoveries.
    """
    rules = _rules_of(recovery, checkpoint)
    if recovery.approximate.stale_steps is None and checkpoint.every_steps:
        # The permission brings its own limit on lost steps, whatever the policy's is.
        rules = replace(rules, stale_steps=STALE_STEPS)
    return None if recovery.allow_approximate or rules == ApproximateConfig() else rules


def made_anew(recovery: RecoveryPolicy) -> Made | None:
    """Return what sizes take into account of the policy; None: it allows no approximate recovery.

    What a person allows later is not known before.
    """
    averages = recovery.approximate.optimizer_state == "Average"
    return Made(averages_optimizer=averages) if recovery.allow_approximate else None


def resolve_stale_steps(recovery: RecoveryPolicy, every_steps: int) -> int:
    """Return how old a checkpoint may be that a lost stage loads alone; 0: no stage does.

    It is the policy's. What a person allows has a limit of its own (:func:`permitted_config`).

    Args:
        recovery: of the job.
        every_steps: between checkpoints; 0: there are none.
    """
    stale_steps = recovery.approximate.stale_steps
    if stale_steps is not None:
        return stale_steps
    # Without a limit on lost steps all go back to the checkpoint: no stage would load it alone.
    return STALE_STEPS if every_steps and recovery.approximate_after_lost_steps is not None else 0


def loads_alone(recovery: RecoveryPolicy, every_steps: int) -> bool:
    """Return whether a lost stage of the job ever loads a checkpoint of its own alone.

    Args:
        recovery: of the job.
        every_steps: between checkpoints; 0: there are none.
    """
    return ApproximateConfig(
        after_lost_steps=recovery.approximate_after_lost_steps,
        stale_steps=resolve_stale_steps(recovery, every_steps),
    ).loads_alone


def _rules_of(recovery: RecoveryPolicy, checkpoint: Checkpoint) -> ApproximateConfig:
    how = recovery.approximate
    return ApproximateConfig(
        after_lost_steps=recovery.approximate_after_lost_steps,
        weights=how.weights,
        lr_boost=how.lr_boost_percent / 100,
        boost_steps=how.boost_steps,
        stale_steps=resolve_stale_steps(recovery, checkpoint.every_steps),
        wait_s=float(how.wait_seconds),
        optimizer_state=how.optimizer_state,
    )


def check_approximate(
    recovery: RecoveryPolicy,
    checkpoint: Checkpoint,
    *,
    stages: int,
    in_order: bool,
) -> None:
    """Refuse rules that could never be used.

    A limit on lost steps stays where the permission is switched off for a while.

    Args:
        recovery: what is said of it.
        checkpoint: of the job.
        stages: of its pipeline.
        in_order: whether all micro-batches pass them in order.

    Raises:
        InvalidSpecError: they could not.
    """
    stale_steps = resolve_stale_steps(recovery, checkpoint.every_steps)
    if stale_steps and not checkpoint.every_steps:
        raise InvalidSpecError(
            "spec.recovery.approximate.staleSteps",
            f"is {stale_steps}, but {STALE_WITHOUT_CHECKPOINTS}",
        )
    if not recovery.allow_approximate:
        return
    alone = loads_alone(recovery, checkpoint.every_steps)
    if stages == 1 or (stages == 2 and in_order and not alone):
        why = no_neighbours(stages, keeps_checkpoints=checkpoint.every_steps > 0)
        raise InvalidSpecError("spec.recovery.allowApproximate", f"is true, but {why}")
