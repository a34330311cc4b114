"""Makes the first state of a rank and its rules, from what its job says and what it trains."""

from __future__ import annotations

import logging

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.job.config import JobConfig, SnapshotConfig, check_window
from mainstay_core.rank import machine
from mainstay_core.rank.adoption import follow
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.reinitialisation.sources import Policy, policy_of
from mainstay_core.snapshots.job_units import check_ordering
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.wire.plan import Method, Plan
from mainstay_core.wire.repeated_lineage import read_outcomes, read_repeats
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.compute.training import Training

logger = logging.getLogger(__name__)


def first_state(
    settings: TrainerSettings, training: Training, heal_address: str, every_steps: int
) -> machine.RankState:
    """Return the state of a rank that has no place yet.

    Args:
        settings: of its trainer.
        training: what it trains.
        heal_address: where others copy its state.
        every_steps: steps between durable checkpoints.

    Raises:
        InvalidSpecError: the model does not tell enough for what the job wants.
    """
    config = settings.config
    state = machine.RankState(
        slot=Slot(pod=PodUid(settings.pod), index=settings.slot),
        incarnation=Incarnation(settings.incarnation),
        num_steps=config.shape.steps,
        shards_per_lane=config.shape.shards_per_lane,
        clip_norm=training.clip_norm,
        heal_address=heal_address,
        checkpoint_every_steps=every_steps,
        snapshots=snapshot_rules(config.snapshots, training),
        fork_rules=fork_rules(config, training),
        repeats=read_repeats(config),
        outcomes=read_outcomes(config),
    )
    return follow(state, config.checks)


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


def check_units(state: machine.RankState, plan: Plan) -> None:
    """Refuse a window that is too long for the model's units, where the job begins.

    A job that has begun keeps its window: that is logged. One that was suspended starts again, with
    a checkpoint.

    Args:
        state: of the trainer.
        plan: that it has adopted.

    Raises:
        InvalidSpecError: the job begins, and no stage has so many units.
    """
    rules = state.snapshots
    if rules is None or rules.units is None:
        return
    try:
        check_window(rules.num_instalments, max(map(len, rules.units.positions)))
    except InvalidSpecError as error:
        if plan.method is Method.START and not state.durable:
            raise
        logger.warning("%s; it stays, as the job has begun: some steps copy nothing", error)


def fork_rules(config: JobConfig, training: Training) -> ForkRules | None:
    """Return by which rules lost stages are made anew of others; None where none ever is.

    They are there also where the job's policy is off, or has no answer yet for so few stages: it
    may change, and a person may allow one recovery. An order says by what rules it is carried out.
    """
    allowed, how = config.approximate is not None, config.approximate_rules
    shape = config.shape
    if not allowed and shape.stages < 2:
        return None
    return ForkRules(
        outline=training.outline(),
        policy=policy_of(how, Policy(order=shape.order)),
        guards=config.guards,
        after_lost_steps=how.after_lost_steps,
        lr_boost=how.lr_boost,
        boost_steps=how.boost_steps,
    )
