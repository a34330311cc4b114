"""When a rank copies its state into memory, and when a snapshot of all positions is complete."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base.ids import Incarnation
from mainstay_core.rank import windows
from mainstay_core.rank.events import GoBack, KeepFrom, KeepRecord, Snapshot
from mainstay_core.rank.state import RankState, SnapshotRules, extend_commit_chain
from mainstay_core.rank.windows import MAX_WINDOW_LAG
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.votes import Commit, SnapshotStatus, Vote

PLAN = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]})


def rank(version: int = 4, **fields: object) -> RankState:
    state = RankState(
        slot=slot_of("a.1"),
        incarnation=Incarnation("a.1"),
        num_steps=100,
        shards_per_lane=1,
        clip_norm=None,
        heal_address="a",
        lineage=2,
        version=version,
        plan=PLAN,
        index=0,
        snapshots=SnapshotRules(),
    )
    return replace(state, **fields)  # type: ignore[arg-type]


def vote(copied: int | None, wanted: int = 1, *, logged: bool = True, **fields: object) -> Vote:
    told = SnapshotStatus(logged=logged, copied=copied or 0, wanted_instalments=wanted)
    given: dict[str, object] = {
        "step": 4,
        "attempt": 0,
        "ok": True,
        "norms_sq": (),
        "gradient": "gradient",
        "state": "state",
        "stats": (),
        "newest_plan": 1,
        "newest_nonce": "n",
        "snapshots": None if copied is None else told,
    }
    return Vote(**(given | fields))  # type: ignore[arg-type]


def votes(*copied: int | None) -> list[Vote]:
    return [vote(told) for told in copied]


def commit_of(step: int) -> Commit:
    return Commit(step=step, norm=1.0, scale=0.5, tokens=4, loss=2.0, data="0" * 32)


# Where a window begins --------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "told", "length"),
    [
        (SnapshotRules(num_instalments=5), 3, 5),
        (SnapshotRules(), 3, 3),
        (SnapshotRules(first_instalments=7), 3, 3),
        (SnapshotRules(first_instalments=7), 0, 7),
    ],
)
def test_a_windows_length_is_the_jobs_or_what_votes_wanted_or_the_first_ones(
    rules: SnapshotRules, told: int, length: int
) -> None:
    begun = windows.begin_window(rank(snapshots=rules, num_instalments=told))

    assert begun.window == Window(first=4, length=length)


def test_the_longest_window_that_a_vote_wants_is_the_next_one_for_all() -> None:
    told = [vote(4, wanted) for wanted in (2, 5, 1, 3)]

    state, _ = windows.note_copies(rank(), told)
    assert state.num_instalments == 5
    assert windows.begin_window(state).window == Window(first=4, length=5)


def test_each_instalment_is_due_at_its_version_and_none_after_the_last() -> None:
    window = Window(first=3, length=2)
    due = [windows.due_snapshot(rank(version, window=window)) for version in range(2, 6)]

    assert due == [(), (Snapshot(3, window),), (Snapshot(4, window),), ()]
    assert windows.due_snapshot(rank(3)) == ()


# Where it ends ----------------------------------------------------------------------


def test_a_window_is_complete_once_every_vote_says_that_its_last_instalment_is_at_its_holders() -> (
    None
):
    state = rank(5, window=Window(first=3, length=3))

    after, actions = windows.note_copies(state, votes(6, 6, 7, 6))
    assert (after.window, actions) == (None, (KeepFrom(2, 3),))

    for told in ((6, 6, 5, 6), (6, 6, None, 6), (0, 6, 6, 6)):
        assert windows.note_copies(state, votes(*told))[1] == ()
        assert windows.note_copies(state, votes(*told))[0].window == state.window


def test_no_window_is_complete_before_its_last_instalment_is_due() -> None:
    state = rank(4, window=Window(first=3, length=3))

    assert windows.note_copies(state, votes(9, 9, 9, 9))[1] == ()


def test_a_window_that_some_holder_never_has_is_given_up_and_drops_nothing() -> None:
    window = Window(first=3, length=3)
    late = window.last + MAX_WINDOW_LAG

    waits, actions = windows.note_copies(rank(late, window=window), votes(9, 9, 5, 9))
    assert (waits.window, actions) == (window, ())

    gone, actions = windows.note_copies(rank(late + 1, window=window), votes(9, 9, 5, 9))
    assert (gone.window, actions) == (None, ())


def test_with_the_window_that_is_given_up_goes_what_has_a_gap_and_takes_the_room() -> None:
    window = Window(first=3, length=3)
    late = window.last + MAX_WINDOW_LAG + 1

    told = [vote(5, logged=False), *votes(9, 9, 9)]
    gone, actions = windows.note_copies(rank(late, window=window), told)
    assert (gone.window, actions) == (None, (KeepFrom(2, late + 1),))


def test_a_gradient_that_is_not_at_its_holders_delays_no_window() -> None:
    told = [vote(6, logged=False), *votes(6, 6, 6)]

    _, actions = windows.note_copies(rank(5, window=Window(first=3, length=3)), told)
    assert actions == (KeepFrom(2, 3),)


class Copies:
    """Copies of all ranks that come to their holders at random, as a twin keeps them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.whole: list[int] = []
        """First versions of windows of which every rank's every instalment is at its holders."""
        self._held: dict[Window, list[set[int]]] = {}

    def vote(self, state: RankState) -> list[Vote]:
        window, told = state.window, []
        assert window is not None
        held = self._held.setdefault(window, [set() for _ in range(4)])
        for index in range(4):
            due = range(window.first, min(state.version, window.last) + 1)
            held[index] |= {v for v in due if self._rng.random() < 0.4}
            left = [v for v in due if v not in held[index]]
            copied = min(left, default=state.version + 1)
            told.append(vote(copied, self._rng.randint(1, 4)))
        if all(len(mine) == window.length for mine in held):
            self.whole.append(window.first)
        return told


@pytest.mark.parametrize("seed", range(30))
def test_what_the_newest_complete_window_needs_is_never_dropped(seed: int) -> None:
    rng = random.Random(seed)
    copies, state, dropped = Copies(rng), windows.begin_window(rank(0)), 0
    for _ in range(60):
        told = copies.vote(state)
        others = [replace(state, index=index) for index in range(4)]
        state, actions = windows.note_copies(state, told)
        assert {windows.note_copies(o, told)[1] for o in others} == {actions}
        for keep in actions:
            assert keep.version in copies.whole
            assert keep.version >= dropped
            dropped = keep.version
        state = replace(state, version=state.version + 1)
        settles = rng.random() < 0.05
        if state.window is None or settles:
            state = windows.begin_window(state)
            assert state.window is not None
            assert state.window.first == state.version
    assert dropped > 0


# Records ----------------------------------------------------------------------------


def test_a_commits_record_has_the_digests_of_the_first_member_of_each_position() -> None:
    told = [
        vote(4, gradient=f"g{m.index}", state=f"s{m.index}") for m in PLAN.members
    ]  # members 0 and 1 are of position 0, 2 and 3 of position 1

    ((keep,), commit) = windows.record_of(rank(), commit_of(4), told), commit_of(4)
    assert isinstance(keep, KeepRecord)
    assert (keep.record.gradients, keep.record.states) == (("g0", "g2"), ("s0", "s2"))
    assert (keep.record.lineage, keep.record.certified_in) == (2, "q1-n")
    assert keep.record.chain == extend_commit_chain("", commit)


def test_a_rank_that_rolls_forward_has_no_digests_but_names_who_certified() -> None:
    (keep,) = windows.record_of(rank(commit_chain="before"), commit_of(4), (), "q0-m")

    assert (keep.record.gradients, keep.record.states) == ((), ())
    assert keep.record.certified_in == "q0-m"
    assert keep.record.chain == extend_commit_chain("before", commit_of(4))


def test_a_job_without_snapshots_has_no_window_no_record_and_no_action() -> None:
    state = rank(snapshots=None)
    told: Sequence[Vote] = votes(None, None, None, None)

    assert windows.begin_window(state) is state
    assert windows.due_snapshot(state) == ()
    assert windows.note_copies(state, told) == (state, ())
    assert windows.record_of(state, commit_of(4), told) == ()


def test_a_rank_that_missed_the_votes_learns_what_they_completed() -> None:
    state = rank(kept_from=2)

    assert windows.catch_up(state, 2) == (state, ())
    assert windows.catch_up(state, 4) == (replace(state, kept_from=4), (KeepFrom(2, 4),))
    assert windows.catch_up(rank(snapshots=None), 4)[1] == ()


def test_a_joiner_lowers_what_its_store_keeps_from_and_a_load_voids_what_is_later() -> None:
    assert windows.go_back(rank(), 3, from_disk=True) == (GoBack(0, 3, drops_later=True),)
    assert windows.go_back(rank(), 3, from_disk=False) == (GoBack(0, 3, drops_later=False),)
    assert windows.go_back(rank(snapshots=None), 3, from_disk=True) == ()
