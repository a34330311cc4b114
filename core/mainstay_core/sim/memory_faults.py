"""Faults of what pods keep in memory: segments that are damaged, stores that do not answer."""

from __future__ import annotations

import random

from mainstay_core.sim.segments import SegmentStore
from mainstay_core.sim.stage import Stage


def damage_segment(world: Stage, rng: random.Random) -> None:
    """Damage a segment that some pod keeps, or now and then all that it keeps of one unit.

    Of four such stores one also has a damaged record of a commit. That is drawn apart.
    """
    stores = [store for store in _stores(world) if store.keys()]
    if not stores:
        return
    store = rng.choice(stores)
    keys = store.keys()
    chosen = rng.choice(keys)
    for key in keys if rng.random() < 0.3 else [chosen]:
        if (key.position, key.unit) == (chosen.position, chosen.unit):
            store.spoil(key)
    apart = random.Random(f"record beside {store.address} {chosen}")
    if apart.random() < 0.25:
        store.spoil_record(apart)


def mute_stores(world: Stage) -> None:
    """Have no store answer the next question of another pod."""
    for store in _stores(world):
        store.is_mute = True


def _stores(world: Stage) -> list[SegmentStore]:
    """Return the stores of all living pods."""
    supervisors = [pod.supervisor for pod in world.pods.values()]
    return [s.segments for s in supervisors if s.alive and s.segments is not None]
