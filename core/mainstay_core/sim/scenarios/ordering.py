"""Draws the order in which micro-batches pass the stages of a simulated job, and its guards."""

from __future__ import annotations

import random
from dataclasses import replace

from mainstay_core.base.shape import Cut, Order
from mainstay_core.sim.scenarios.scenario import Scenario

SHARE_SWAPPED = 0.3
"""Of the seeds with several stages, and no logs of boundaries: the pipeline is swapped."""


def with_order(scenario: Scenario) -> Scenario:
    """Return the scenario, in some seeds with a swapped pipeline. The rest is as in order."""
    rng, config = random.Random(f"order {scenario.seed}"), scenario.config
    refused = config.snapshots and config.snapshots.boundary
    if config.shape.stages < 2 or refused or rng.random() > SHARE_SWAPPED:
        return scenario
    shape = replace(config.shape, order=Order.SWAPPED, cut=Cut.EQUAL)
    may = config.approximate is not None and shape.ranks_per_stage == 1
    guards = rng.choice((0, 1, 2, 2, 3)) if may else 0
    return replace(scenario, config=replace(config, shape=shape, guards=guards))
