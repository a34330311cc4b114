"""Mistakes with devices that were named as wrong, while the store forgets them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.coordinator.intake import store_recovery
from mainstay_core.sim import draw
from mainstay_core.sim.scenarios.scenario import Fault, Scenario
from mainstay_core.supervisor import slots

STORES = ("store-flush", "store-fallback")
BESIDE = ("kill-pod", "kill-pod", "kill-trainer", "reset", "break-chain", "kill-meeting")
"""What else is lost."""
BEFORE_ASKED = ("votes-gathered", "Compute", "vote-posted", "settle-posted")
"""Where a pod is lost when two replicas have disagreed, and not both have been asked again."""
NUM_STEPS = 32
"""So many that a device has left before the end, whatever is lost between."""


def draw_lost_stores(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which a device is wrong each time, and the store forgets that.

    Between the two, or after them, something else may be lost: a member that has named it, too.
    """
    scenario, rng = draw(seed, ("stick",)), random.Random(f"lost stores {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=3,
        replicas=3,
        shards_per_lane=1,
        micro_batches=1,
        stages=2,
        ranks_per_stage=1,
        steps=NUM_STEPS,
    )
    faults = [Fault(kind="stick", point="FORWARD", times=rng.randint(1, 12))]
    if rng.random() < 0.5:
        faults.append(Fault(kind=rng.choice(kinds), at_s=rng.random()))
    faults.append(Fault(kind=rng.choice(STORES), at_s=1.5 * rng.random()))
    if rng.random() < 0.3:
        faults.append(Fault(kind=rng.choice(STORES), at_s=1.5 * rng.random()))
    config = replace(
        scenario.config,
        shape=shape,
        spares=rng.choice((0, 1)),
        goes_back=rng.random() < 0.5,
        witness_every_steps=1,
    )
    return replace(scenario, config=config, faults=tuple(faults))


def draw_lost_words(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which one of two replicas is wrong once, and a pod is then lost.

    There is no spare: whether the job goes on at once depends on whose word was lost.
    """
    scenario, rng = draw(seed, ("corrupt-unseen",)), random.Random(f"lost words {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=2,
        replicas=2,
        shards_per_lane=1,
        micro_batches=1,
        stages=2,
        ranks_per_stage=1,
        steps=8,
    )
    lost = Fault(kind=rng.choice(kinds), point=rng.choice(BEFORE_ASKED), times=rng.randint(1, 4))
    wrong = Fault(kind="corrupt-unseen", point="FORWARD", times=rng.randint(1, 8))
    config = replace(scenario.config, shape=shape, spares=0, witness_every_steps=1)
    return replace(scenario, config=config, faults=(wrong, lost))


_NAMED = vars(slots)["_named"]


def _told_and_forgotten(state: Any, fact: Any) -> Any:
    done = _NAMED(state, fact)
    return replace(done, state=replace(done.state, named=state.named))


TAINT_MUTANTS = {
    "named-forgotten": Mutant(
        "supervisors forget who was named: a store that has lost that hears of it no more",
        [(slots, "_named", _told_and_forgotten)],
        BESIDE,
        draws=draw_lost_stores,
    ),
    "taints-forgotten": Mutant(
        "a store that lost the job learns nothing of tainted steps from the plan",
        [(store_recovery, "recovered", lambda state, _: state)],
        BESIDE,
        draws=draw_lost_stores,
        first=2,
    ),
}
