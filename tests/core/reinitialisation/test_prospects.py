"""What is said of a stage before it is lost: from what it could be made anew."""

from __future__ import annotations

import pytest

from mainstay_core.reinitialisation.prospects import list_prospects
from mainstay_core.reinitialisation.sources import Left, NoSource, Policy, plan_reinitialisation
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import BlockOutline, Rule, StageOutline


def stages(number: int, rule: Rule | None = None, *, ends: bool = True) -> list[StageOutline]:
    cut = [(BlockOutline(name=f"layers.{i}", kind="layer", rule=rule),) for i in range(number)]
    if ends:
        cut[0] = (BlockOutline(name="embedding", kind="embedding"), *cut[0])
    return cut


def reasons(cut: list[StageOutline], **policy: Weighting) -> list[str]:
    return [p.reason for p in list_prospects(cut, policy=Policy(**policy)) if p.possible]


@pytest.mark.parametrize(
    ("weighting", "words"),
    [
        (Weighting.GRADIENT_NORM, "stages 0 and 2, weighed by their squared gradient norms in"),
        (Weighting.UNIFORM, "stages 0 and 2, one half each"),
        (Weighting.COPY, "a copy of stage 0"),
    ],
)
def test_an_inner_stage_is_made_of_both_neighbours(weighting: Weighting, words: str) -> None:
    (reason,) = reasons(stages(3), weighting=weighting)
    assert reason.startswith(words)


def test_a_block_that_may_only_be_copied_names_both_that_it_may_come_from() -> None:
    (reason,) = reasons(stages(3, Rule.COPY))
    assert reason == "a copy of stage 0 or 2, by which has the larger gradient"


def test_the_answer_is_that_of_the_plan_for_each_stage_and_number_of_ranks() -> None:
    for number in range(1, 7):
        for rule in (None, *Rule):
            for width in (1, 2):
                cut = stages(number, rule)
                found = list_prospects(cut, policy=Policy(), ranks_per_stage=width)
                for stage, prospect in enumerate(found):
                    plan = plan_reinitialisation(
                        cut,
                        [(stage, inner) for inner in range(width)],
                        version=0,
                        norms_sq={},
                        left=Left(),
                        policy=Policy(),
                        ranks_per_stage=width,
                    )
                    assert (prospect.stage, prospect.possible) == (
                        stage,
                        not isinstance(plan, NoSource),
                    )
                    assert prospect.reason


@pytest.mark.parametrize(("durable", "possible"), [(40, [True] * 3), (30, [False, True, False])])
def test_a_young_checkpoint_of_its_own_goes_before_other_stages(
    durable: int, possible: list[bool]
) -> None:
    found = list_prospects(stages(3), policy=Policy(stale_steps=10), version=50, durable=durable)

    assert [prospect.possible for prospect in found] == possible
    own = "its own checkpoint of step 40"
    assert [p.reason == own for p in found] == [durable == 40] * 3


def test_where_no_stage_loads_alone_a_checkpoint_of_this_very_step_is_no_prospect() -> None:
    found = list_prospects(stages(3), policy=Policy(), version=50, durable=50)

    assert [prospect.possible for prospect in found] == [False, True, False]
