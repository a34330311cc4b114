"""Deliberate mistakes in logs of boundaries, and in what is computed again from them.

As in :mod:`tests.core.sim.mutants`: each removes one rule from a running simulation.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.rank.boundaries import BoundaryStep
from mainstay_core.rank.votes import clip
from mainstay_core.sim import draw, terms
from mainstay_core.sim.boundary_replayer import BoundaryReplayer
from mainstay_core.sim.scenario import Scenario, draw_losses


def draw_boundaries(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a pipeline that logs boundaries, over long windows, and loses stages.

    It has one replica, whose cells copy all units of their stages, one after the other.
    """
    assert not kinds, "a loss is drawn here"
    scenario, rng = draw(seed, ("damage-segment",)), random.Random(f"boundary of {kinds} {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=1,
        replicas=1,
        shards_per_lane=2,
        stages=3,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=14,
    )
    (loss, *_) = draw_losses(rng, shape.num_ranks, ("kill-stage",), ("kill-stage",))
    loss = replace(loss, times=rng.randint(3 * shape.num_ranks, 10 * shape.num_ranks))
    # Another stage is lost in the same step, or none is.
    losses = (loss, replace(loss, times=loss.times + 1))[: rng.randint(1, 2)]
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, memory_bytes=1 << 32, num_instalments=3, peers=2, boundary=True)
    config = replace(
        scenario.config,
        shape=shape,
        snapshots=snapshots,
        spares=shape.stages,
        redundancy=None,
        checkpoint_dir="",
    )
    config = replace(config, shape=replace(shape, checkpoint_every_steps=0))
    return replace(scenario, config=config, units=3, slots_per_pod=1, faults=losses)


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
    told = terms.norms_sq(own._replay.position, 0)
    return clip(told[:1], step.record.commit.tokens, terms.CLIP_NORM)[1]


BOUNDARY_MUTANTS = {
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
