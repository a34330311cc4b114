"""Settles of jobs with several ranks to a stage: a cell computes again whole, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_boundary_stores import ACTIVATION, COMMITTED, LINEAGE, STATE, Pod
from tests.core.rank.test_settle_stores import lost, member

from mainstay_core.job.config import LogKind
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import SettleReport

STAY, ROLL, HEAL, REPLAY = (
    StateAction.STAY,
    StateAction.ROLL,
    StateAction.HEAL,
    StateAction.REPLAY,
)
LIVES = ("a.1", "b.1", "c.1", "d.1")
"""Of two stages with two ranks each."""
FOLLOWERS = (("e.1", 2), ("f.1", 3))
TYPES = range(2)


def plan_of(followers: Sequence[tuple[str, int]] = ()) -> Plan:
    """A replica of two stages, two types, and followers; by index: a, b, c, (e,) d, (f)."""
    since = dict.fromkeys([*LIVES, *(life for life, _ in followers)], 1)
    plan = make_plan(
        {0: LIVES},
        followers=followers,
        ranks_per_stage=2,
        lanes=1,
        shards_per_lane=len(TYPES),
        quorum=2,
        since=since,
    )
    return replace(plan, lineage=LINEAGE)


def stores(last: int = 7) -> list[Pod]:
    """Stores from which stage 1 comes again at versions 4 to ``last``, by both inner ranks."""
    pod = Pod("a", records=dict.fromkeys(range(4, last), True))
    pod.units = {(position, unit, STATE, 4) for position in (2, 3) for unit in (0, 1)}
    pod.logs = {
        (sender, ACTIVATION, step, shard_type, COMMITTED)
        for sender in (0, 1)
        for step in range(4, last)
        for shard_type in TYPES
    }
    return [pod]


def settled(plan: Plan, reports: Sequence[SettleReport], pods: Sequence[Pod]) -> Settlement:
    return settle(plan, len(TYPES), reports, [p.report() for p in pods], LogKind.BOUNDARY)


def test_the_whole_cell_of_a_lost_rank_replays_and_gives_up_what_it_has() -> None:
    held = (Partial(lane=0, first=0, last=1),)
    reports = [member(i, 7, held=held, held_in=2) for i in (0, 1, 3)] + [lost(2)]

    outcome = settled(plan_of(), reports, stores())

    assert outcome.version == 7
    assert outcome.actions == (STAY, STAY, REPLAY, REPLAY)
    assert set(outcome.replays) == {2, 3}
    for position, replay in outcome.replays.items():
        assert isinstance(replay, BoundaryReplay)
        assert (replay.position, replay.first_step, replay.version) == (position, 4, 7)
        assert {key.position for step in replay.steps for key, _ in step.inputs} == {position - 2}
    assert outcome.step.todo == {0: (0, 1)}, "what the cell held is void"


def test_a_rank_with_a_mark_replays_with_its_cell_and_does_not_roll() -> None:
    reports = [member(0, 7), member(1, 7), lost(2), member(3, 6, mark="q1-n", certified_in=None)]

    outcome = settled(plan_of(), reports, stores())

    assert (outcome.version, outcome.actions) == (7, (STAY, STAY, REPLAY, REPLAY))


def test_followers_keep_the_state_or_copy_it_from_those_that_replay() -> None:
    plan = plan_of(FOLLOWERS)
    assert [m.index for m in plan.position_members(2)] == [2, 3]
    reports = [member(0, 7), member(1, 7), lost(2), lost(3), member(4, 7), member(5, 7, state="s")]

    outcome = settled(plan, reports, stores())

    assert outcome.actions == (STAY, STAY, REPLAY, HEAL, REPLAY, STAY)
    assert (outcome.sources[3], outcome.expected[3]) == ((2,), "")
    assert settled(plan, reports, stores(8)).expected[3] == "s", "as the votes on step 7 told"


@pytest.mark.parametrize("spoilt", ["units", "logs"])
def test_a_cell_of_which_one_rank_cannot_be_had_reaches_nothing(spoilt: str) -> None:
    pods = stores()
    if spoilt == "units":  # those of the rank that is there: it would have to begin again, too
        pods[0].units = {unit for unit in pods[0].units if unit[0] != 3}
    else:
        pods[0].logs = {log for log in pods[0].logs if log[0] != 1}

    outcome = settled(plan_of(), [member(0, 7), member(1, 7), lost(2), member(3, 7)], pods)

    assert set(outcome.actions) == {StateAction.LOAD}
    told = "position 3" if spoilt == "units" else "activation of position 1, type 0, in step 4"
    assert told in outcome.reason


def test_with_a_holder_elsewhere_nobody_replays() -> None:
    reports = [member(0, 7), member(1, 7), lost(2), member(3, 7), member(4, 7), member(5, 7)]

    outcome = settled(plan_of(FOLLOWERS), reports, stores())

    assert outcome.actions == (STAY, STAY, HEAL, STAY, STAY, STAY)
    assert outcome.replays == {}
