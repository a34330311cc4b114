"""Every row of the ladder from values, and what is said about the rows passed over."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mainstay_core.coordinator.ladder import Row, Situation, StageHolders, decide
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.wire.reinitialisation import BlockOutline, StageOutline

ALL = frozenset(Row)


def stage(number: int, holders: int, living: int | None = None, **fields: Any) -> StageHolders:
    return StageHolders(
        stage=number, holders=holders, living=holders if living is None else living, **fields
    )


def outline(num_stages: int) -> tuple[StageOutline, ...]:
    """A layer to each stage, all alike."""
    return tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(num_stages))


def situation(*stages: StageHolders, **fields: Any) -> Situation:
    fields.setdefault("executable", ALL)
    fields.setdefault("outline", outline(len(stages)))
    return Situation(stages=stages, step=fields.pop("step", 100), **fields)


WHOLE = (stage(0, 2), stage(1, 2))
HALF = (stage(0, 2), stage(1, 1))
EMPTY = (stage(0, 2), stage(1, 0))
INNER = (stage(0, 2), stage(1, 0), stage(2, 2))
FIRST = (stage(0, 0), stage(1, 2), stage(2, 2))
SIDE_BY_SIDE = (stage(0, 2), stage(1, 0), stage(2, 0), stage(3, 2))
REPLAYABLE = (stage(0, 2), stage(1, 0, replayable=True))

CASES = [
    ("leaving cell hands over", situation(*WHOLE, leaving=1), Row.HAND_OVER),
    (
        "a lost cell is more urgent than a leaving one",
        situation(*HALF, leaving=1, lost=1),
        Row.MASK,
    ),
    ("a check disagrees", situation(*WHOLE, disagreement="norms differ"), Row.RECHECK),
    ("every stage has a cell", situation(*HALF, lost=1), Row.MASK),
    ("snapshots and logs", situation(*REPLAYABLE, lost=2, free_slots=1), Row.REPLAY),
    (
        "snapshots without logs of one of two stages",
        situation(stage(0, 0), stage(1, 0, replayable=True), lost=4, free_slots=2),
        Row.RESTART,
    ),
    ("a durable version", situation(*EMPTY, lost=2, free_slots=1, durable_step=80), Row.RESTART),
    ("the seed", situation(*EMPTY, lost=2, free_slots=1), Row.RESTART),
    (
        "a joiner without a state is no holder",
        situation(stage(0, 2), stage(1, 0, living=1), lost=1),
        Row.RESTART,
    ),
    (
        "old checkpoint, approximate allowed",
        situation(
            *INNER,
            lost=2,
            free_slots=1,
            durable_step=50,
            allow_approximate=True,
            approximate_after_lost_steps=20,
        ),
        Row.APPROXIMATE,
    ),
    (
        "old checkpoint, approximate not allowed",
        situation(*EMPTY, lost=2, free_slots=1, durable_step=50, approximate_after_lost_steps=20),
        Row.RESTART,
    ),
    (
        "checkpoint new enough",
        situation(
            *EMPTY,
            lost=2,
            free_slots=1,
            durable_step=90,
            allow_approximate=True,
            approximate_after_lost_steps=20,
        ),
        Row.RESTART,
    ),
    (
        "no exact source, approximate allowed",
        situation(*INNER, lost=2, free_slots=1, durable_step=None, allow_approximate=True),
        Row.APPROXIMATE,
    ),
    (
        "old checkpoint, and the lost stage has no two neighbours",
        situation(
            *FIRST,
            lost=2,
            free_slots=1,
            durable_step=50,
            allow_approximate=True,
            approximate_after_lost_steps=20,
        ),
        Row.RESTART,
    ),
    (
        "old checkpoint, and two stages side by side",
        situation(
            *SIDE_BY_SIDE,
            lost=4,
            free_slots=2,
            durable_step=50,
            allow_approximate=True,
            approximate_after_lost_steps=20,
        ),
        Row.RESTART,
    ),
    (
        "no source at all, and the lost stage has no two neighbours",
        situation(*FIRST, lost=2, free_slots=1, durable_step=None, allow_approximate=True),
        Row.WAIT,
    ),
    (
        "the seed at a late step, approximate allowed",
        situation(*INNER, lost=2, free_slots=1, step=101, allow_approximate=True),
        Row.APPROXIMATE,
    ),
    (
        "the seed in the first steps, approximate allowed",
        situation(*INNER, lost=2, free_slots=1, step=100, allow_approximate=True),
        Row.RESTART,
    ),
    (
        "the seed at a late step, a bound within which it lies",
        situation(
            *INNER,
            lost=2,
            free_slots=1,
            step=1000,
            allow_approximate=True,
            approximate_after_lost_steps=1000,
        ),
        Row.RESTART,
    ),
    (
        "the first checkpoint at a late step, no bound",
        situation(*INNER, lost=2, free_slots=1, step=10**6, durable_step=1, allow_approximate=True),
        Row.RESTART,
    ),
    (
        "kinds of blocks are not known",
        situation(
            *INNER,
            lost=2,
            free_slots=1,
            durable_step=None,
            allow_approximate=True,
            outline=(),
        ),
        Row.WAIT,
    ),
    (
        "no exact source, not allowed",
        situation(*EMPTY, lost=2, free_slots=1, durable_step=None),
        Row.WAIT,
    ),
    ("no trainer for the place", situation(*EMPTY, lost=2, free_slots=0), Row.WAIT),
    (
        "all stages gone: nothing to initialise from",
        situation(
            stage(0, 0),
            stage(1, 0),
            lost=4,
            free_slots=2,
            durable_step=None,
            allow_approximate=True,
        ),
        Row.WAIT,
    ),
]


@pytest.mark.parametrize(("case", "given", "row"), CASES, ids=[c[0] for c in CASES])
def test_row(case: str, given: Situation, row: Row) -> None:
    decision = decide(given)
    assert decision.row is row, case
    assert decision.exact == (row is not Row.APPROXIMATE)
    assert decision.reason
    is_second_choice = len(decision.why_not) > row.value
    assert len(decision.why_not) == (Row.WAIT if is_second_choice else row.value)
    assert not is_second_choice or (row is Row.RESTART and given.allow_approximate)
    assert all(w.startswith(f"row {i} (") for i, w in enumerate(decision.why_not))


@pytest.mark.parametrize(
    ("given", "row"),
    [
        (situation(*WHOLE, disagreement="norms differ"), Row.RECHECK),
    ],
)
def test_a_row_that_cannot_be_executed_yet_waits_with_that_reason(
    given: Situation, row: Row
) -> None:
    now = Situation(
        **{f: getattr(given, f) for f in given.__dataclass_fields__ if f != "executable"}
    )
    decision = decide(now)
    assert decision.row is Row.WAIT
    assert f"({row.name.lower()}) cannot be executed yet" in decision.reason
    assert decision.why_not[-1].startswith(f"row {row.value} ")


def test_a_restart_names_the_newest_exact_source() -> None:
    decision = decide(situation(*EMPTY, lost=2, free_slots=1, durable_step=80))
    assert decision.from_step == 80
    assert "step 80" in decision.reason


def test_a_wait_says_what_would_have_to_change() -> None:
    decision = decide(situation(stage(0, 0), stage(1, 1), stage(2, 0), lost=4, free_slots=1))
    assert decision.reason == (
        "stages 0, 2 have no living cell: needs 2 free trainers, 1 free trainer there"
    )


def test_every_situation_has_one_row_and_the_first_that_applies_wins() -> None:
    values = itertools.product((0, 1), (0, 1), (0, 1, 2), (0, 2), (None, 0, 90), (True, False))
    for leaving, lost, holders, free, durable, allow in values:
        given = situation(
            stage(0, 2),
            stage(1, holders),
            stage(2, 2),
            leaving=leaving,
            lost=lost,
            free_slots=free,
            durable_step=durable,
            allow_approximate=allow,
        )
        decision = decide(given)
        expected = Row.WAIT
        if leaving and not lost:
            expected = Row.HAND_OVER
        elif holders:
            expected = Row.MASK if lost else Row.WAIT
        elif free and durable is not None:
            expected = Row.RESTART
        elif free and allow:
            expected = Row.APPROXIMATE
        assert decision.row is expected, given


def test_permission_leaves_no_job_worse_off() -> None:
    """Whatever is lost: with it a job never waits where it would go back without it."""
    kinds = ([0, 2], [0, 2], [0, 2], [0, 2])
    for cells in itertools.product(*kinds):
        for durable, limit in itertools.product((None, 0, 40, 90), (None, 0, 50)):
            fields: dict[str, Any] = {
                "lost": 2,
                "free_slots": 4,
                "durable_step": durable,
                "step": 101,
                "approximate_after_lost_steps": limit,
            }
            stages = [stage(number, living) for number, living in enumerate(cells)]
            without = decide(situation(*stages, **fields))
            allowed = decide(situation(*stages, **fields, allow_approximate=True))

            assert allowed.row <= without.row or allowed.row is Row.APPROXIMATE
            if without.row is Row.RESTART and allowed.row is Row.RESTART:
                assert allowed.from_step == without.from_step
            inner_and_apart = all(
                0 < i < 3 and cells[i - 1] and cells[i + 1] for i in range(4) if not cells[i]
            )
            if allowed.row is Row.APPROXIMATE:
                assert inner_and_apart


@pytest.mark.parametrize("copied", [(), ("norm",)])
@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)])
def test_an_inner_rank_is_not_made_anew_beside_others_that_hold_parts_of_it_in_copies(
    lost: tuple[int, ...], copied: tuple[str, ...]
) -> None:
    """Without its moments the copies would differ after the next step, and no vote agree again."""
    blocks = tuple(
        (BlockOutline(name=f"layers.{i}", kind="layer", copied=copied),) for i in range(3)
    )
    given = situation(
        *(
            stage(number, 0 if number == 1 and inner in lost else 2, inner=inner)
            for number in range(3)
            for inner in range(2)
        ),
        outline=blocks,
        lost=2 * len(lost),
        free_slots=len(lost),
        step=500,
        allow_approximate=True,
    )

    decision = decide(given)

    apart = bool(copied) and len(lost) == 1
    assert decision.row is (Row.RESTART if apart else Row.APPROXIMATE)
    assert any("in copies" in why for why in decision.why_not) == apart


@pytest.mark.parametrize("lost", [(0,), (1,), (1, 2), (4,)])
@pytest.mark.parametrize(
    ("stale_steps", "durable", "own"),
    [(10, 490, True), (9, 490, False), (10, 0, False), (0, 490, False)],
)
def test_a_lost_stage_goes_on_from_its_own_checkpoint_up_to_an_age(
    lost: tuple[int, ...], stale_steps: int, durable: int, own: bool
) -> None:
    """Before its neighbours; and it is the only way at an end, and for two side by side."""
    stages = [StageHolders(stage=i, holders=i not in lost, living=i not in lost) for i in range(5)]
    decision = decide(
        situation(
            *stages,
            free_slots=2,
            step=500,
            durable_step=durable,
            allow_approximate=True,
            approximate_after_lost_steps=1,
            reinitialisation=Policy(stale_steps=stale_steps),
        )
    )

    has_neighbours = lost == (1,)
    made = own or has_neighbours
    assert decision.row is (Row.APPROXIMATE if made else Row.RESTART)
    assert ("own checkpoint of step 490" in decision.reason) == own
    assert ("from other stages" in decision.reason) == (made and not own)
