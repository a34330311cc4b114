"""Lists what is explored of jobs that make lost stages anew of others: what holds, and mistakes."""

from __future__ import annotations

from typing import Any

from tests.model.configurations import budget, mutant
from tests.model.values import Cfg

PIPELINE: dict[str, Any] = {"N": 1, "P": 3, "forks": True, "steps": 1, "restarts": False}
"""One cell for each of three stages: the one in the middle can be made anew of the others."""
LONG: dict[str, Any] = PIPELINE | {
    "spares": 2, "steps": 3, "restarts": True, "grow": True, "max_plans": 40,
}  # fmt: skip
CELLS = LONG | {"N": 2, "spares": 1}
LOSSES = budget(crash=2, stop=2, glitch=1, suspect=1)

FORKED_WITHOUT_POD0 = (
    "replica0 finishes",
    "replica1 finishes",
    *(f"pod{i} posts" for i in range(6)),
    *(f"pod{i} completes reduce" for i in range(6)),
    "pod0 completes vote",
    "STOP pod0",
    "CRASH pod1",
    "CRASH pod4",
    "api0 decides q2",
    *(f"pod{i} adopts" for i in (2, 3, 5, 6)),
    *(f"pod{i} completes settle" for i in (2, 3, 5, 6)),
    "pod6 makes",
    "replica1 finishes type 0",
    "replica1 finishes type 1",
    *(f"pod{i} posts" for i in (2, 3, 5, 6)),
    *(f"pod{i} completes reduce" for i in (2, 3, 5, 6)),
    "pod3 completes vote",
    "GLITCH pod5",
    "continue pod0",
)
"""Pod 0 alone has applied a step. The others fork below it, and commit it in another way; pod 0 is
back before all have heard that."""
AWAY: dict[str, Any] = CELLS | {
    "steps": 1,
    "restarts": False,
    "max_plans": 4,
    "bud": budget(crash=2, stop=1, glitch=1),
    "prefix": FORKED_WITHOUT_POD0,
}

FORK_EXHAUSTIVE = [
    Cfg("1x3 + spare, a stage is lost and made anew", spares=1, bud=budget(crash=1), **PIPELINE),
]
FORK_SLOW = [
    Cfg(
        "1x3 + 2 spares, another stage is lost meanwhile",
        spares=2,
        max_plans=8,
        bud=budget(crash=2),
        **PIPELINE,
    ),
    Cfg(
        "1x3 + spare, a stage is silent, and comes back after the fork",
        spares=1,
        grow=True,
        max_plans=8,
        bud=budget(stop=1),
        **PIPELINE,
    ),
]
FORK_SLOW.append(Cfg("2x3 + spare, one has applied alone what others fork below", **AWAY))
FORK_RANDOM = [
    Cfg("1x3 + 2 spares, 3 steps, every loss", bud=LOSSES, **LONG),
    Cfg("1x5 + 2 spares, 3 steps, every loss", bud=LOSSES, **LONG | {"P": 5}),
    Cfg("2x3 + spare, 3 steps, every loss", bud=LOSSES, **CELLS),
]
FORK_MUTANTS = [
    mutant(
        "fork_voids_all",
        "under a fork's plan states of the lineage before do not count",
        spares=1,
        bud=budget(crash=1),
        **PIPELINE,
    ),
    mutant(
        "fork_keeps_held+patch_missing_only",
        "what came through the lost stage counts in the step that is computed again",
        spares=1,
        bud=budget(crash=1),
        **PIPELINE,
    ),
    mutant(
        "fork_not_in_history",
        "who keeps its state does not note the fork",
        spares=1,
        bud=budget(crash=1),
        **PIPELINE,
    ),
    mutant(
        "fork_twice",
        "a fork that is repeated is added to the history",
        "simulate",
        bud=LOSSES,
        **LONG,
    ),
    mutant(
        "fork_counts_all+fork_other_course",
        "a state counts whatever its lineage and its forks: the lost stage's true one, too",
        "simulate",
        bud=LOSSES,
        **LONG,
    ),
    mutant(
        "fork_older",
        "a fork goes back to a version that is not the newest that all others reach",
        "simulate",
        bud=LOSSES,
        **CELLS,
    ),
    mutant(
        "made_though_held",
        "what is ordered is made anew, though a member holds it",
        "simulate",
        bud=LOSSES,
        **LONG | {"P": 5},
    ),
    mutant(
        "fork_counts_away",
        "in a fork that is repeated the state of a rank counts that was left out meanwhile",
        **AWAY,
    ),
]
FORK_FIRST_WALK = {
    "fork_twice": 35,
    "fork_counts_all+fork_other_course": 155,
    "made_though_held": 30,
}
"""The walk from which on some mistakes are looked for: those before do not show them."""
