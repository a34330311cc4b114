"""Which action of which rank a fault fires at."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_core.base.ids import RankId
from mainstay_core.faults.points import PHASES, SENDS_BACK, SENDS_ON, FaultAction, FaultPoint
from mainstay_core.planning.program import Op

RANK = RankId(replica=1, stage=0)


def fault(**fields: Any) -> FaultPoint:
    given = {"id": "f", "step": 5, "action": FaultAction.KILL_TRAINER, "replica": 1, "stage": 0}
    return FaultPoint(**(given | fields))


def test_without_a_phase_it_fires_at_the_steps_first_action() -> None:
    assert fault().matches(5, RANK, "FORWARD")
    assert fault().matches(5, RANK, "RECV_F")


def test_it_fires_in_its_step_only() -> None:
    assert not fault().matches(4, RANK, "FORWARD")
    assert not fault().matches(6, RANK, "FORWARD")


@pytest.mark.parametrize(
    "other",
    [
        RankId(replica=0, stage=0),
        RankId(replica=1, stage=1),
        RankId(replica=1, stage=0, inner=1),
        RankId(replica=None, stage=0),
    ],
)
def test_all_three_coordinates_of_the_rank_must_agree(other: RankId) -> None:
    assert not fault().matches(5, other, "FORWARD")


def test_an_alias_stands_for_all_its_actions() -> None:
    assert fault(phase="backward").matches(5, RANK, "BACKWARD_INPUT")
    assert fault(phase="backward").matches(5, RANK, "BACKWARD_WEIGHT")
    assert not fault(phase="backward").matches(5, RANK, "FORWARD")


def test_an_action_may_be_named_itself() -> None:
    assert fault(phase="SEND_B").matches(5, RANK, "SEND_B")
    assert not fault(phase="SEND_B").matches(5, RANK, "SEND_F")


def test_without_a_phase_no_action_in_the_background_is_meant() -> None:
    assert fault().matches(5, RANK, "SNAPSHOT")
    assert not fault().matches(5, RANK, "SNAPSHOT_COPIED")
    assert not fault().matches(5, RANK, "SNAPSHOT_HELD")


def test_a_fault_on_a_spare_matches_no_rank() -> None:
    assert not fault(replica=None, stage=None, spare=0).matches(5, RANK, "FORWARD")


def test_aliases_stand_for_actions_that_programs_have() -> None:
    assert {op for ops in PHASES.values() for op in ops} <= set(Op)


def test_a_wait_inside_of_an_action_is_hit_by_a_fault_that_names_it_alone() -> None:
    assert fault(phase="inner-wait").matches(5, RANK, "INNER_WAIT")
    assert not fault().matches(5, RANK, "INNER_WAIT")
    assert not fault(phase="forward").matches(5, RANK, "INNER_WAIT")


def test_every_action_of_a_program_can_be_named() -> None:
    named = {op for ops in PHASES.values() for op in ops} | {*SENDS_ON, *SENDS_BACK}
    assert named == {op.value for op in Op}
