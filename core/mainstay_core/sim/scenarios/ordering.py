"""Draws the order in which micro-batches pass the stages of a simulated job, and its guards."""

from __future__ import annotations

import random
from dataclasses import replace

from mainstay_core.base.shape import Cut, Order
from mainstay_core.sim.scenarios.fault_draws import HARMLESS
from mainstay_core.sim.scenarios.scenario import GUARDED, Fault, Scenario

SHARE_SWAPPED = 0.3
"""Of the seeds with several stages, and no logs of boundaries: the pipeline is swapped."""
SHARE_SWAPPED_FORKS = 0.54
"""The same of the jobs of which it is said whether stages may be made anew: half of all of them, as
some have logs of boundaries."""
SHARE_WITH_WRONG_GUARDS = 0.4
"""Of those with guards."""


def with_order(
    scenario: Scenario, kinds: tuple[str, ...] = (), share: float = SHARE_SWAPPED
) -> Scenario:
    """Return the scenario, in a share of the seeds with a swapped pipeline.

    The rest is as in order.
    """
    rng, config = random.Random(f"order {scenario.seed}"), scenario.config
    refused = config.snapshots and config.snapshots.boundary
    if config.shape.stages < 2 or refused or rng.random() > share:
        return scenario
    shape = replace(config.shape, order=Order.SWAPPED, cut=Cut.EQUAL)
    # They serve with the policy off, too, as a person may allow a recovery.
    guards = rng.choice((0, 1, 2, 2, 3)) if shape.ranks_per_stage == 1 else 0
    found = replace(scenario, config=replace(config, shape=shape, guards=guards))
    return _with_wrong_guards(found, kinds) if guards else found


def _with_wrong_guards(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario, in some seeds with copies of guards that become wrong."""
    rng = random.Random(f"guards {scenario.seed}")
    # Whoever could tell that a copy is wrong must not die before the vote that does.
    may = set(GUARDED) <= set(kinds) and all(f.kind in HARMLESS for f in scenario.faults)
    if not may or rng.random() > SHARE_WITH_WRONG_GUARDS:
        return scenario
    faults = list(scenario.faults)
    for _ in range(rng.randint(1, 2)):
        times = rng.randint(1, 4 * scenario.config.shape.num_ranks)
        fault = Fault(kind="corrupt-guard", point="applied", times=times)
        faults.insert(rng.randint(0, len(faults)), fault)
    return replace(scenario, faults=tuple(faults))
