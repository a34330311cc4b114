"""The protocol holds in every state of small models, and each rule of it is needed.

The first tests explore what fits into a minute. The others, and the larger bounds, run in
``make chaos``. A violation shows with its shortest trace.
"""

from __future__ import annotations

import pytest
from tests.model.configurations import EXHAUSTIVE, MUTANTS, RANDOM
from tests.model.exploring import explore, simulate
from tests.model.fork_configurations import (
    FORK_EXHAUSTIVE,
    FORK_FIRST_WALK,
    FORK_MUTANTS,
    FORK_RANDOM,
    FORK_SLOW,
)
from tests.model.guard_configurations import (
    GUARD_EXHAUSTIVE,
    GUARD_FIRST_WALK,
    GUARD_MUTANTS,
    GUARD_RANDOM,
    GUARD_SLOW,
)
from tests.model.memory_configurations import (
    FIRST_WALK,
    MEMORY_EXHAUSTIVE,
    MEMORY_MUTANTS,
    MEMORY_RANDOM,
    MEMORY_SLOW,
)
from tests.model.values import Cfg

MAX_STATES = 60_000
"""What a configuration of the first tests may have; one that has more is not complete."""
MANY_STATES = 600_000
NUM_WALKS = 12
MANY_WALKS = 400
QUICK = ("2x1, 2 steps, two crashes",)
QUICK_MUTANTS = (
    "vote_stage_only", "in_place", "roll_if_all_reduced", "edge", "heal_outside",
)  # fmt: skip
SLOW_MUTANTS = (
    "fork_older:", "fork_counts_away:", "fork_other_course:", "guard_late_gradient:",
)  # fmt: skip
"""Mutants of forks and guards that take `make test` too long; `fork_counts_all+...` is quicker."""


def told(result: dict) -> str:
    return "\n".join([result.get("what", ""), *result.get("trace", ())])


def check_all(config: Cfg, limit: int) -> None:
    result = explore(config, limit=limit)

    assert result["ok"], told(result)
    assert result["complete"], f"{config.name}: more than {limit} states"
    assert not result["truncated"], f"{config.name}: plans follow each other without end"


def check_found(config: Cfg, how: str, limit: int, runs: int) -> None:
    first = (FIRST_WALK | FORK_FIRST_WALK | GUARD_FIRST_WALK).get(config.name.partition(":")[0], 0)
    if how == "explore":
        result = explore(config, limit=limit)
    else:
        result = simulate(config, 1, runs, first=first)

    assert not result["ok"] or result.get("truncated"), f"not found: {config.name}"


def is_quick(config: Cfg) -> bool:
    return config.name.startswith(QUICK_MUTANTS)


@pytest.mark.parametrize(
    "config",
    [
        *(c for c in EXHAUSTIVE if c.name in QUICK),
        *MEMORY_EXHAUSTIVE,
        *FORK_EXHAUSTIVE,
        *GUARD_EXHAUSTIVE,
    ],
    ids=lambda c: c.name,
)
def test_every_reachable_state_holds_and_can_still_finish(config: Cfg) -> None:
    check_all(config, MAX_STATES)


@pytest.mark.parametrize("config", MEMORY_RANDOM, ids=lambda c: c.name)
def test_walks_through_larger_models_hold(config: Cfg) -> None:
    result = simulate(config, 1, NUM_WALKS)

    assert result["ok"], told(result)
    assert {"sent to heal", "loaded from disk", "steps applied"} <= set(result["cover"])
    if config is MEMORY_RANDOM[0]:
        assert "made anew" in result["cover"], "no walk has replayed anything"


@pytest.mark.parametrize("config", [*FORK_RANDOM[:1], *GUARD_RANDOM[:1]], ids=lambda c: c.name)
def test_walks_through_models_with_forks_hold(config: Cfg) -> None:
    result = simulate(config, 1, NUM_WALKS)

    assert result["ok"], told(result)
    assert {"sent to heal", "loaded from disk", "steps applied"} <= set(result["cover"])


@pytest.mark.parametrize(
    ("config", "how"),
    [
        *(m for m in MUTANTS if is_quick(m[0])),
        *(
            pytest.param(*m, marks=pytest.mark.chaos if m[0].name.startswith(SLOW_MUTANTS) else ())
            for m in MEMORY_MUTANTS + FORK_MUTANTS + GUARD_MUTANTS
        ),
    ],
    ids=lambda c: getattr(c, "name", ""),
)
def test_a_rule_that_is_left_out_is_missed(config: Cfg, how: str) -> None:
    check_found(config, how, MAX_STATES, MANY_WALKS)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "config", [*EXHAUSTIVE, *MEMORY_SLOW, *FORK_SLOW, *GUARD_SLOW], ids=lambda c: c.name
)
def test_every_reachable_state_of_larger_models_holds(config: Cfg) -> None:
    result = explore(config, limit=MANY_STATES)

    assert result["ok"], told(result)
    assert not result.get("truncated")


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "config", [*RANDOM, *MEMORY_RANDOM, *FORK_RANDOM, *GUARD_RANDOM], ids=lambda c: c.name
)
def test_many_walks_hold(config: Cfg) -> None:
    result = simulate(config, 2, MANY_WALKS)

    assert result["ok"], told(result)
    assert not config.window or {"made anew", "made anew in vain"} <= set(result["cover"])
    assert not config.forks or "made of others" in result["cover"]


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("config", "how"),
    [m for m in MUTANTS if not is_quick(m[0])],
    ids=lambda c: getattr(c, "name", ""),
)
def test_each_rule_that_is_left_out_is_missed(config: Cfg, how: str) -> None:
    check_found(config, how, MANY_STATES, 10 * MANY_WALKS)
