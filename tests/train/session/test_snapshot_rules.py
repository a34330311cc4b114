"""By which rules a trainer copies its state, and which of them its model has too few units for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.rank.machine import RankState
from mainstay_core.wire.plan import Method, Plan
from mainstay_train.session.rules import check_units, snapshot_rules

NO_EXPERTS = {"experts": ()}
UNITS = [SimpleNamespace(name=name, kind="layer") for name in "abcd"]
TRAINING: Any = SimpleNamespace(
    job_units=lambda: SimpleNamespace(positions=(UNITS[:1], UNITS[1:]), **NO_EXPERTS)
)
CONFIG = SnapshotConfig(memory_bytes=1)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_window_has_at_most_a_step_for_each_unit_of_the_largest_stage(length: int) -> None:
    rules = snapshot_rules(replace(CONFIG, num_instalments=length), TRAINING)
    assert rules is not None
    assert rules.num_instalments == length


def plan_of(method: Method) -> Plan:
    return replace(make_plan({0: ["a.1"]}, lanes=1), method=method)


def state_of(length: int, **fields: Any) -> RankState:
    state = RankState(
        slot=slot_of("a.1"),
        incarnation=Incarnation("a.1"),
        num_steps=20,
        shards_per_lane=1,
        clip_norm=None,
        heal_address="a.1",
        snapshots=snapshot_rules(replace(CONFIG, num_instalments=length), TRAINING),
    )
    return replace(state, **fields)


def test_a_longer_one_is_refused_where_the_job_begins_in_the_words_of_a_submission() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        check_units(state_of(4), plan_of(Method.START))
    assert str(caught.value) == (
        "spec.snapshots.window: is 4, but no stage has more than 3 units of which a step could "
        "copy one; use at most 3, or Auto"
    )
    check_units(state_of(3), plan_of(Method.START))
    check_units(replace(state_of(3), snapshots=None), plan_of(Method.START))


@pytest.mark.parametrize(
    ("method", "durable"), [(Method.JOIN, 0), (Method.RESTART, 6), (Method.START, 6)]
)
def test_a_job_that_has_begun_keeps_a_longer_one_and_the_log_says_so(
    method: Method, durable: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier release has taken it, and it cannot change: the job must not fail of it."""
    check_units(state_of(4, durable=durable), plan_of(method))
    (line,) = caplog.messages
    assert line.startswith("spec.snapshots.window: is 4, but no stage has more than 3 units")
    assert line.endswith("it stays, as the job has begun: some steps copy nothing")
