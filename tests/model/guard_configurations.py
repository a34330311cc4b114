"""Lists what is explored of jobs that keep what an end alone has: what holds, and mistakes."""

from __future__ import annotations

from typing import Any

from tests.model.configurations import budget, mutant
from tests.model.values import Cfg

END: dict[str, Any] = {
    "N": 1, "P": 2, "forks": True, "guards": 1, "steps": 2, "spares": 1, "restarts": False,
}  # fmt: skip
"""One cell for each of two stages: the first can be made anew of the second, which guards it."""
ONE = END | {"bud": budget(crash=1)}
THREE = ONE | {"P": 3, "steps": 1}
"""With a third stage, one may know that a step is committed as the end is lost; the guard rolls."""
LONG: dict[str, Any] = END | {
    "N": 2, "guards": 2, "spares": 2, "restarts": True, "grow": True, "max_plans": 40,
}  # fmt: skip
LOSSES = budget(crash=3, stop=1, glitch=1, suspect=1, full=1, damage=1)

BOTH = range(4)
"""The cells of two replicas: 0 and 2 are of the end, 1 and 3 beside it."""
COPIED = (
    "replica0 finishes",
    "replica1 finishes",
    *(f"pod{i} posts" for i in BOTH),
    *(f"pod{i} completes reduce" for i in BOTH),
    "pod1 copies",
)
TWO: dict[str, Any] = END | {"N": 2, "guards": 2, "steps": 1, "max_plans": 4}
DIFFER = TWO | {
    "bud": budget(crash=2, damage=1),
    "prefix": (*COPIED, "pod3 copies", "DAMAGE copy of pod1", "CRASH pod0", "CRASH pod2"),
}
"""Both owners are lost as the copies of their two guards differ."""
APPLIED = TWO | {
    "bud": budget(crash=2),
    "prefix": (
        *COPIED,
        "pod3 copies",
        "pod1 takes",
        "pod3 takes",
        "pod1 completes vote",
        "CRASH pod0",
        "CRASH pod2",
    ),
}
"""One guard has applied a step with which the other has to catch up, and the end is lost."""
MAKING = TWO | {
    "guards": 1,
    "spares": 2,
    "max_plans": 5,
    "bud": budget(crash=3),
    "prefix": (
        *COPIED,
        "CRASH pod0",
        "CRASH pod2",
        "api0 decides q2",
        *(f"pod{i} adopts" for i in (1, 3, 4, 5)),
        *(f"pod{i} completes settle" for i in (1, 3, 4, 5)),
    ),
}
"""The end is made anew of one guard, which may be lost before it has given what it keeps."""

GUARD_EXHAUSTIVE = [
    Cfg("1x2 + spare, an end is lost and made anew", **ONE),
    Cfg("1x3 + spare, an end is lost as a step is committed", **THREE),
    Cfg("2x2 + spare, copies differ as the end is lost", **DIFFER),
    Cfg("2x2 + spare, a guard has to catch up as the end is lost", **APPLIED),
]
GUARD_SLOW = [
    Cfg("2x2 + 2 spares, the guard may be lost that an end is made of", **MAKING),
    Cfg(
        "1x2 + 2 spares, another stage, or the guard, is lost meanwhile",
        **END | {"spares": 2, "max_plans": 8, "bud": budget(crash=2)},
    ),
    Cfg(
        "1x2 + spare, a copy is damaged, and the end is lost",
        **END | {"max_plans": 8, "bud": budget(crash=1, damage=1)},
    ),
]
GUARD_RANDOM = [
    Cfg("2x3 + 2 spares, 1 guard, 2 steps, every loss", bud=LOSSES, **LONG | {"P": 3, "guards": 1}),
    Cfg("2x2 + 2 spares, 2 guards, 2 steps, every loss", bud=LOSSES, **LONG),
]
GUARD_MUTANTS = [
    mutant("guard_counts_early", "a guard counts that has not copied yet", **ONE),
    mutant("guard_late_gradient", "a guard gets the gradient after its vote", **THREE),
    mutant("guard_not_rolled", "who rolls forward leaves its copy as it was", **THREE),
    mutant("guard_late_copy", "a new guard votes first, and copies when it can", **ONE),
    mutant("end_without_guard", "an end is made of its twin alone where no guard is left", **ONE),
    mutant(
        "guard_kept_when_bad",
        "a copy that the vote has found to differ stays",
        **END | {"bud": budget(damage=1)},
    ),
    mutant("guard_any", "of copies that differ the first counts", **DIFFER),
    mutant("guard_anywhere", "a copy counts that is not at the version of all", **APPLIED),
    mutant("make_half", "an end goes on without what its guard had, as that is gone", **MAKING),
    mutant("guard_survives_load", "who loads a checkpoint keeps the copy that it had", **THREE),
    mutant(
        "guard_survives_heal",
        "a cell that copies another's state keeps the copy that it had",
        "simulate",
        bud=LOSSES,
        **LONG,
    ),
    mutant(
        "guard_not_relieved",
        "who guards no more keeps its copy",
        "simulate",
        bud=LOSSES,
        **LONG | {"guards": 1},
    ),
    mutant(
        "fork_other_course",
        "the state counts of who has met nobody since its stage was made anew at that version",
        "simulate",
        bud=LOSSES,
        **LONG | {"P": 3, "guards": 1},
    ),
]
GUARD_FIRST_WALK = {"guard_survives_heal": 55, "fork_other_course": 1_000_064}
"""The walk from which on some mistakes are looked for: those before do not show them."""
