"""What follows from a plan is kept. A run in which all is decided and checked anew is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.sim.fork_mutants import draw_ends
from tests.core.sim.mutants import Mutant, applied

from mainstay_core.sim import Scenario, draw, simulate
from mainstay_core.sim.scenarios.scenario import FORKING, IN_MEMORY, WITNESSED
from mainstay_core.wire.plan import Plan


def _decide_anew(
    plan: Plan, name: str, others: tuple[object, ...], decide: Callable[[], Any]
) -> Any:
    del plan, name, others
    return decide()


(OWNER,) = (kind for kind in Plan.__mro__ if "follow" in vars(kind))
ANEW = Mutant("nothing that follows from a plan is kept", [(OWNER, "follow", _decide_anew)], ())


@pytest.mark.parametrize(
    "scenario",
    [
        *(draw(seed) for seed in range(3)),
        draw(1, kinds=IN_MEMORY),
        draw(1, kinds=WITNESSED),
        draw_ends(1, FORKING),
    ],
    ids=lambda s: f"{s.seed}",
)
def test_a_run_in_which_all_is_decided_and_checked_anew_is_the_same(scenario: Scenario) -> None:
    kept = simulate(scenario, tracing=True)
    with applied(ANEW):
        assert simulate(scenario, tracing=True) == kept
