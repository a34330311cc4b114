"""The matrix of losses has every pair of two values that can meet, and names all others."""

from __future__ import annotations

import random

import pytest
from tests.e2e import loss_factors, loss_search, loss_table, stage_losses
from tests.e2e.loss_factors import RULES, VALUES, Rule, complete, pairs

pytestmark = pytest.mark.slow

TABLE = [loss_factors.parse(line) for line in loss_table.TABLE.strip().splitlines()]


def test_every_pair_of_values_occurs_or_is_named_as_impossible() -> None:
    found = {pair for values in TABLE for pair in pairs(values)}
    excluded = loss_table.excluded_pairs()
    assert found.isdisjoint(excluded)
    assert found | excluded.keys() == loss_factors.all_pairs()


def test_every_loss_of_the_matrix_is_possible_and_is_what_its_line_says() -> None:
    for values in TABLE:
        assert not loss_factors.broken_rules(values), values
        assert values.keys() == VALUES.keys()
    losses = stage_losses.table()
    assert len(set(losses)) == len(losses)
    assert [{name: getattr(loss, name) for name in VALUES} for loss in losses] == TABLE


def test_no_pair_is_excluded_that_some_loss_has() -> None:
    reasons = {rule.why for rule in RULES}
    for pair, why in loss_table.excluded_pairs().items():
        assert complete(dict(pair)) is None, pair
        assert why in reasons, why


def test_a_pair_of_a_loss_that_no_rule_refuses_is_found_to_be_possible() -> None:
    """A twin of the search: losses are drawn whole, and all rules are asked."""
    rng, possible, num_found = random.Random(1), loss_factors.possible_pairs(), 0
    for _ in range(9000):
        values = {name: rng.choice(choices) for name, choices in VALUES.items()}
        if loss_factors.broken_rules(values):
            continue
        num_found += 1
        assert possible.issuperset(pairs(values)), values
    assert num_found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why)
def test_each_rule_refuses_something_that_no_other_does(rule: Rule) -> None:
    """A rule that forbids nothing by itself would be a reason that is none."""
    assert loss_search.refused_by(rule) is not None


def test_each_further_loss_breaks_what_its_name_says() -> None:
    for loss in stage_losses.table():
        faults = loss.cascade()
        assert bool(faults) == (loss.further != "nothing"), loss
        names = {name for group in loss.needed() for name in group}
        assert names == {fault["id"] for fault in loss.faults(loss.step)}
        stage = loss.further_stage
        if loss.further == "beside":
            assert any(stage in (lost - 1, lost + 1) for lost in loss.lost_stages)
        if loss.further == "apart":
            assert stage is not None
            assert all(abs(stage - lost) > 1 for lost in loss.lost_stages)
        if loss.further in ("beside", "apart"):
            assert stage not in loss.lost_stages


def test_a_run_of_which_one_fault_has_not_fired_proves_nothing() -> None:
    loss = stage_losses.parse("stage snapshot-held first 2 moe float32 2 2")
    needed = loss.needed()
    assert needed == [{"loss-0"}, {"loss-1"}]
    report = {"faults": [{"id": f"loss-{n}", "state": "fired"} for n in (0, 1)]}
    stage_losses.check_fired(report, needed)
    report["faults"][1]["state"] = "missed"
    with pytest.raises(AssertionError, match=r"of \['loss-1'\] none has fired"):
        stage_losses.check_fired(report, needed)
