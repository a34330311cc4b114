"""When a rank writes a durable checkpoint, and when a version is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base.ids import Incarnation
from mainstay_core.rank import checkpoints
from mainstay_core.rank.events import RenameCheckpoint, SendFact, WriteCheckpoint
from mainstay_core.rank.saving.saves import Attempt, Saves, ends_attempt, judge_saves, writer_of
from mainstay_core.rank.state import RankState
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.votes import Commit, SaveStatus

PLAN = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, quorum=3)
"""Members 0 and 1 hold stage 0, 2 and 3 stage 1."""
COMMIT = Commit(step=0, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
IDLE = Saves()
WRITES = Saves(busy=(2,))


def member(index: int = 0, **fields: object) -> RankState:
    state = RankState(
        slot=slot_of("a.1"),
        incarnation=Incarnation("a.1"),
        num_steps=25,
        shards_per_lane=1,
        clip_norm=None,
        heal_address="",
        checkpoint_every_steps=10,
        plan=PLAN,
        index=index,
        commit=COMMIT,
    )
    return replace(state, **fields)  # type: ignore[arg-type]


def boundary(state: RankState, version: int, saves: Saves = IDLE) -> tuple[RankState, list[object]]:
    """The votes of the step before ``version``, then its boundary."""
    state, learnt = checkpoints.note_saves(state, saves)
    state, begun = checkpoints.begin_due(replace(state, version=version))
    return state, [*learnt, *begun]


def test_every_positions_lowest_member_writes_when_it_is_due() -> None:
    writers = [i for i in range(4) if boundary(member(i), 10)[1]]

    assert writers == [0, 2] == sorted({writer_of(PLAN, i) for i in range(4)})
    assert boundary(member(), 9)[1] == []
    assert boundary(member(), 10)[1] == [WriteCheckpoint(10, COMMIT, "")]


def test_who_writes_a_part_knows_which_version_has_to_stay_when_room_is_made() -> None:
    state = replace(member(), all_clean_at=7)
    assert boundary(state, 10)[1] == [WriteCheckpoint(10, COMMIT, "", clean_at=7)]


def test_a_version_counts_from_the_newest_complete_one() -> None:
    assert boundary(member(), 14, Saves(durable=5))[1] == []
    assert boundary(member(), 15, Saves(durable=5))[1] != []


def test_an_attempt_is_made_once_in_a_quorum() -> None:
    state, _ = boundary(member(), 10)

    assert boundary(state, 11)[1] == [], "failed or slow: not every step again"
    assert boundary(state, 20)[1] != []


def test_what_is_still_being_written_is_not_overtaken_and_that_is_told_once() -> None:
    state, actions = boundary(member(), 10, WRITES)
    (tell,) = actions
    assert isinstance(tell, SendFact)
    assert (tell.fact.kind, tell.fact.step) == (FactKind.CHECKPOINT, 10)

    state, actions = boundary(state, 11, WRITES)
    assert actions == []
    assert boundary(state, 12)[1] == [WriteCheckpoint(12, COMMIT, "")], "as soon as it can"
    assert boundary(member(1), 10, WRITES)[1] == [], "one of them tells it"


def test_all_members_decide_alike_whatever_their_own_writing_does() -> None:
    for saves in (IDLE, WRITES, Saves(safe=Attempt(version=10, nonce="n")), Saves(durable=10)):
        outcomes = {boundary(member(i), 20, saves)[0].tried for i in range(4)}
        assert len(outcomes) == 1


def test_a_new_quorum_tries_again_what_the_old_one_did_not_complete() -> None:
    state, _ = boundary(member(), 10)
    state = checkpoints.settled(state, durable=0)

    assert boundary(state, 11)[1] != []


def test_an_older_quorums_attempt_is_completed_when_all_its_parts_are_safe() -> None:
    state = checkpoints.settled(member(version=12), durable=0)
    safe = Saves(safe=Attempt(version=10, nonce="older"))

    state, actions = boundary(state, 12, safe)
    assert actions == [RenameCheckpoint(10, "older")], "and nothing is begun beside it"
    assert boundary(state, 13, safe)[1] == [], "it is renamed once"


def test_a_version_that_cannot_be_renamed_does_not_end_the_writing_of_later_ones() -> None:
    safe = Saves(safe=Attempt(version=10, nonce="n"))
    state, _ = boundary(member(), 10)
    state, actions = boundary(state, 11, safe)
    assert actions == [RenameCheckpoint(10, "n")]

    state, actions = boundary(state, 12, safe)  # the disk is full
    assert actions == []
    assert boundary(state, 20, safe)[1] == [WriteCheckpoint(20, COMMIT, "")]


def test_the_last_version_is_always_due() -> None:
    state, _ = boundary(member(), 20)

    assert boundary(state, 25, Saves(durable=20))[1] == [WriteCheckpoint(25, COMMIT, "")]
    assert boundary(member(checkpoint_every_steps=0), 25)[1] == []


def last(index: int = 0) -> RankState:
    return replace(boundary(member(index), 25)[0], version=25)


def test_the_job_ends_when_its_last_version_is_durable() -> None:
    state = last()
    state, actions, done = checkpoints.end_round(state, Saves(safe=Attempt(version=25, nonce="n")))
    assert (actions, done) == ((RenameCheckpoint(25, "n"),), False)

    _, actions, done = checkpoints.end_round(state, Saves(durable=25))
    assert (actions, done) == ((), True)


def test_the_last_version_is_begun_when_an_older_one_is_out_of_the_way() -> None:
    state, _ = boundary(member(), 20)
    state, actions = boundary(state, 25, WRITES)
    assert actions == []

    state, actions, done = checkpoints.end_round(state, Saves(safe=Attempt(version=20, nonce="n")))
    assert (actions, done) == ((RenameCheckpoint(20, "n"),), False)
    state, actions, done = checkpoints.end_round(state, Saves(durable=20))
    assert (actions, done) == ((WriteCheckpoint(25, COMMIT, ""),), False)


def test_a_job_ends_without_its_last_checkpoint_when_that_cannot_be_written_and_says_so() -> None:
    state = last()
    state, actions, done = checkpoints.end_round(state, IDLE)

    (tell,) = actions
    assert isinstance(tell, SendFact)
    assert tell.fact.kind is FactKind.CHECKPOINT
    assert "25" in tell.fact.evidence
    assert done


def test_statuses_are_taken_by_position_whoever_of_it_wrote() -> None:
    part = SaveStatus(checkpoint_safe=10, checkpoint_nonce="n")
    none = SaveStatus()

    assert judge_saves(PLAN, (part, none, none, part)).safe == Attempt(version=10, nonce="n")
    assert judge_saves(PLAN, (part, part, none, none)).safe is None


def test_the_newest_attempt_to_write_a_version_is_renamed_though_an_older_one_was() -> None:
    """A rank that comes back tells of an attempt whose parts are gone by now."""
    state = member(version=20, durable=10)
    stale, fresh = (Attempt(version=20, nonce=nonce) for nonce in ("9_b", "10_a"))

    state, actions = checkpoints.note_saves(state, Saves(safe=stale))
    assert actions == (RenameCheckpoint(20, "9_b"),)
    assert checkpoints.note_saves(state, Saves(safe=stale))[1] == ()
    state, actions = checkpoints.note_saves(state, Saves(safe=fresh))
    assert actions == (RenameCheckpoint(20, "10_a"),)
    assert checkpoints.note_saves(state, Saves(safe=stale))[1] == ()


def test_of_two_attempts_that_are_safe_that_of_the_newer_quorum_counts() -> None:
    statuses = tuple(
        SaveStatus(checkpoint_safe=20, checkpoint_nonce=nonce)
        for nonce in ("9_b", "10_a", "9_b", "10_a")
    )
    assert judge_saves(PLAN, statuses).safe == Attempt(version=20, nonce="10_a")


@pytest.mark.parametrize(
    ("other", "ends"),
    [("9_a", True), ("10_a", True), ("10_b", False), ("11_a", False), ("5eed", True)],
)
def test_an_attempt_ends_those_of_its_quorum_and_of_older_ones(other: str, ends: bool) -> None:
    assert ends_attempt("10_a", other) is ends
