"""Makes the rules by which a rank decides, from what its job says and what it trains."""

from __future__ import annotations

from mainstay_core.job.config import ApproximateConfig, SnapshotConfig
from mainstay_core.rank import machine
from mainstay_core.rank.forks import ForkRules
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.snapshots.job_units import check_ordering
from mainstay_core.snapshots.orderings import Ordering
from mainstay_train.compute.training import Training


def snapshot_rules(
    config: SnapshotConfig | None, training: Training
) -> machine.SnapshotRules | None:
    """Return by which rules this trainer copies its state.

    Raises:
        InvalidSpecError: the model does not tell enough for the ordering.
    """
    if config is None:
        return None
    units, ordering = training.job_units(), Ordering(config.ordering)
    check_ordering(units, ordering)
    return machine.SnapshotRules(
        num_instalments=config.num_instalments,
        peers=config.peers,
        ordering=ordering,
        decay=config.decay,
        units=units,
        log=config.log,
    )


def fork_rules(config: ApproximateConfig | None, training: Training) -> ForkRules | None:
    """Return by which rules lost stages are made anew; None where none may be."""
    if config is None:
        return None
    return ForkRules(
        outline=training.outline(),
        policy=Policy(weighting=Weighting(config.weights)),
        after_lost_steps=config.after_lost_steps,
        lr_boost=config.lr_boost,
        boost_steps=config.boost_steps,
    )
