"""Deliberate mistakes in logs of boundaries, and in what is computed again from them.

As in :mod:`tests.core.sim.mutants`: each removes one rule from a running simulation.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.base.shape import Order
from mainstay_core.rank import settle
from mainstay_core.rank.reach import lost_positions
from mainstay_core.rank.replays import boundary_stores
from mainstay_core.rank.replays.boundaries import BoundaryStep
from mainstay_core.rank.replays.boundary_stores import AnyStores, BoundaryStores
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.votes import clip
from mainstay_core.sim import draw, terms
from mainstay_core.sim.scenarios.fault_draws import draw_cascade, draw_losses
from mainstay_core.sim.scenarios.scenario import Fault, Scenario
from mainstay_core.sim.trainers.boundary_replayer import BoundaryReplayer
from mainstay_core.sim.trainers.replayer import Replayer
from mainstay_core.snapshots.stretches import Border, Stretch
from mainstay_core.wire.plan import Plan

LOSSES_OF_CELLS = ("kill-trainer", "kill-pod", "kill-stage", "kill-two", "kill-all")


def draw_boundaries(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a pipeline that logs boundaries, over long windows, and loses stages.

    It has one replica, whose cells copy all units of their stages, one after the other.
    """
    assert not kinds, "a loss is drawn here"
    scenario, rng = _pipeline(seed, 3), random.Random(f"boundary of {kinds} {seed}")
    shape = scenario.config.shape
    (loss, *_) = draw_losses(rng, shape.num_ranks, ("kill-stage",), ("kill-stage",))
    loss = replace(loss, times=rng.randint(3 * shape.num_ranks, 10 * shape.num_ranks))
    # Another stage is lost in the same step, or none is.
    losses = (loss, replace(loss, times=loss.times + 1))[: rng.randint(1, 2)]
    return replace(scenario, faults=losses)


def draw_cascades(seed: int, kinds: tuple[str, ...] = ()) -> Scenario:
    """Return the same pipeline, or a longer one, that loses more while it replays a stage."""
    assert not kinds, "losses are drawn here"
    rng = random.Random(f"cascades {seed}")
    scenario = _pipeline(seed, rng.choice((3, 5)))
    return replace(scenario, faults=tuple(draw_cascade(rng, scenario.config.shape.num_ranks)))


def draw_further_losses(seed: int, kinds: tuple[str, ...] = ()) -> Scenario:
    """Return the same pipelines with logs of gradients, which lose more while they replay."""
    assert not kinds, "losses are drawn here"
    scenario, rng = draw_cascades(seed), random.Random(f"further losses {seed}")
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    config = replace(scenario.config, snapshots=replace(snapshots, boundary=False))
    more = Fault(
        kind=rng.choice(("kill-stage", "kill-stage", "kill-two", "kill-meeting", "kill-pod")),
        point="replay-half",
        times=rng.choice((1, 1, 2, 3)),
    )
    first = replace(scenario.faults[0], point="applied")
    return replace(scenario, config=config, faults=(first, more, replace(more, times=2)))


def draw_refusals(seed: int, kinds: tuple[str, ...] = ()) -> Scenario:
    """Return three replicas that refuse a step over a bad state, and lose a stage soon after."""
    assert not kinds, "losses are drawn here"
    rng = random.Random(f"refusals {seed}")
    scenario = _pipeline(seed, 2, replicas=3)
    bad = Fault(kind="corrupt-state", point="KeepFrom", times=rng.randint(1, 12))
    loss = Fault(kind="kill-stage", point="applied", times=rng.randint(7, 18))
    return replace(scenario, faults=(bad, loss))


def _pipeline(seed: int, stages: int, replicas: int = 1) -> Scenario:
    """Return replicas that log boundaries over windows of three versions, without a disk."""
    scenario = draw(seed, ("damage-segment",))
    shape = replace(
        scenario.config.shape,
        lanes=replicas,
        replicas=replicas,
        shards_per_lane=2,
        stages=stages,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=14,
        order=Order.IN_ORDER,
    )
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, memory_bytes=1 << 32, num_instalments=3, peers=2, boundary=True)
    config = replace(
        scenario.config,
        shape=shape,
        snapshots=snapshots,
        spares=shape.stages * shape.lanes,
        redundancy=None,
        checkpoint_dir="",
    )
    config = replace(config, shape=replace(shape, checkpoint_every_steps=0))
    return replace(scenario, config=config, units=3, slots_per_pod=1, faults=())


def _by_itself(lost: Collection[int], position: int, width: int) -> Stretch:
    """Each lost stage is computed again by itself, whatever is lost beside it."""
    del lost
    return Stretch(first=position // width, last=position // width)


class _AnyQuorum(dict[int, set[str]]):
    """Every quorum has committed every step."""

    def get(self, step: int, default: Any = None) -> Any:
        del step, default
        return _Everything()


class _Everything:
    def __contains__(self, item: object) -> bool:
        return True


def _find_whoever_voted(own: Any, border: Border, step: int, shard_type: int) -> Any:
    """A log counts whatever became of the attempt that its sender voted in."""
    certified, own.certified = own.certified, _AnyQuorum()
    try:
        return _FIND(own, border, step, shard_type)
    finally:
        own.certified = certified


_FIND = vars(BoundaryStores)["_find_holders"]


def draw_cells(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a job that logs boundaries, with two ranks to a stage, and loses some of them.

    Args:
        seed: draws it.
        kinds: of losses; another one may come while a cell computes again.
    """
    scenario, rng = draw_boundaries(seed, ()), random.Random(f"cells {seed}")
    lanes = rng.choice((1, 1, 2))
    shape = replace(
        scenario.config.shape,
        lanes=lanes,
        replicas=lanes,
        stages=rng.choice((1, 2, 2, 3)),
        order=Order.IN_ORDER,
        ranks_per_stage=2,
    )
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, num_instalments=rng.choice((1, 2, 3)))
    losses = draw_losses(rng, shape.num_ranks, ("damage-segment",), kinds)
    times = rng.randint(3 * shape.num_ranks, 10 * shape.num_ranks)
    at_last = Fault(kind=rng.choice(kinds), point="vote-posted", times=times)
    config = replace(scenario.config, shape=shape, snapshots=snapshots, spares=lanes * 2)
    return replace(scenario, config=config, faults=(at_last, *losses))


def _lost_alone(
    plan: Plan, actions: Sequence[StateAction], stores: AnyStores, goal: Any
) -> dict[int, Any]:
    """Of a cell the ranks that are lost replay, and nobody computes with them."""
    found = _REPLAYS(plan, actions, stores, goal)
    lost = lost_positions(plan, goal.counted)
    return {position: replay for position, replay in found.items() if position in lost}


_REPLAYS = vars(settle)["_replays"]


def _all_units(own: BoundaryReplayer, step: BoundaryStep) -> list[int]:
    """Frozen units are updated like others."""
    del step
    return sorted(own._units)


async def _load_once(own: Any, loads: Any) -> None:
    """A unit is loaded once; the replay goes on with its own."""
    await _LOAD(own, [load for load in loads if load.key.unit not in own._units])


_LOAD = vars(BoundaryReplayer)["_load"]
_SCALE = vars(BoundaryReplayer)["scale"]


def _own_scale(own: BoundaryReplayer, step: BoundaryStep) -> float:
    """The norm is that of what was computed again."""
    if not step.frozen:
        return float(_SCALE(own, step))
    told = terms.norms_sq(terms.blocks_of(own._replay.position), None)
    return clip(told[:1], step.record.commit.tokens, terms.CLIP_NORM)[1]


_CAN_GO_ON = vars(Replayer)["can_go_on"]


def _goes_on_too_far(own: Any, lineage: int, replay: Any) -> bool:
    """What was on its way when a quorum ended counts as applied."""
    goes_on = bool(_CAN_GO_ON(own, lineage, replay))
    if goes_on and own.has_begun:
        reached = min(replay.version, min(own._made.values()) + 1)
        own._made = {unit: max(version, reached) for unit, version in own._made.items()}
    return goes_on


BOUNDARY_MUTANTS = {
    "step-on-its-way-counts": Mutant(
        "a replay by gradients goes on behind the step that was on its way when its quorum ended",
        [(Replayer, "can_go_on", _goes_on_too_far)],
        (),
        draws=draw_further_losses,
    ),
    "boundary-log-of-another-attempt": Mutant(
        "what crossed a boundary in an attempt that was refused counts as that of the step",
        [(BoundaryStores, "_find_holders", _find_whoever_voted)],
        (),
        draws=draw_refusals,
        first=9,
    ),
    "stretch-not-enlarged": Mutant(
        "lost stages beside each other are computed again each by itself",
        [(boundary_stores, "find_stretch", _by_itself)],
        (),
        draws=draw_cascades,
    ),
    "cell-not-whole": Mutant(
        "the ranks of a cell that have their state leave those alone that compute again",
        [(settle, "_replays", _lost_alone)],
        LOSSES_OF_CELLS,
        draws=draw_cells,
        first=10,
    ),
    "frozen-unit-updated": Mutant(
        "a unit without its full state is updated as if it had it",
        [(BoundaryReplayer, "active", _all_units), (BoundaryReplayer, "_load", _load_once)],
        (),
        draws=draw_boundaries,
    ),
    "norm-of-active-units": Mutant(
        "a replayed step is applied with the norm of what was computed again",
        [(BoundaryReplayer, "scale", _own_scale)],
        (),
        draws=draw_boundaries,
    ),
}
