"""When a rank copies its state into memory, and when a snapshot of all positions is complete."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan, slot_of

from mainstay_core.base.ids import Incarnation
from mainstay_core.job.config import MAX_AUTO_WINDOW, MAX_LAG_STEPS, LogKind
from mainstay_core.rank import windows
from mainstay_core.rank.events import GoBack, KeepFrom, KeepRecord, PlacedUnit, Snapshot
from mainstay_core.rank.settle import PositionDigests, settle
from mainstay_core.rank.state import RankState, SnapshotRules, extend_commit_chain
from mainstay_core.snapshots.job_units import Expert, JobUnits
from mainstay_core.snapshots.orderings import Ordering
from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.votes import Commit, SettleReport, SnapshotStatus, Vote
from mainstay_core.wire.windows import Measures, Popularity, WindowBasis

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


def vote(
    copied: int | None, told: Measures | None = None, *, logged: bool = True, **fields: object
) -> Vote:
    status = SnapshotStatus(logged=logged, copied=copied or 0, measures=told)
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
        "snapshots": None if copied is None else status,
    }
    return Vote(**(given | fields))  # type: ignore[arg-type]


def votes(*copied: int | None) -> list[Vote]:
    return [vote(told) for told in copied]


def stayed(index: int, **fields: object) -> SettleReport:
    report = SettleReport(index=index, valid=True, lineage=2, settled=PLAN.members[index].since)
    return replace(report, **fields)  # type: ignore[arg-type]


def commit_of(step: int) -> Commit:
    return Commit(step=step, norm=1.0, scale=0.5, tokens=4, loss=2.0, data="0" * 32)


# Where a window begins --------------------------------------------------------------


UNITS = (4, 3)
"""Units of the positions, with 2 and 1 elements of 4 bytes in turn. Two of stage 0 are experts."""


def units() -> JobUnits:
    """Two stages; the experts of the first one are counted by the first two integers."""

    def unit(stage: int, number: int) -> Unit:
        expert = stage == 0 and number < 2
        return Unit(
            name=f"{stage}.{number}",
            kind=UnitKind.EXPERT if expert else UnitKind.LAYER,
            position=Position(stage=stage),
            block=f"{stage}.{0 if expert else number}",
            block_index=0 if expert else number,
            spans=(Span(start=0, stop=2 - number % 2),),
        )

    return JobUnits(
        positions=tuple(
            tuple(unit(stage, number) for number in range(count))
            for stage, count in enumerate(UNITS)
        ),
        types=StateTypes(compute_bytes=4, master_bytes=4, optimizer_bytes=()),
        experts=tuple(Expert(unit=f"0.{n}", layer=1, tokens=n) for n in range(2)),
    )


def measures(rate: int, step_us: int = 1_000_000) -> Measures:
    return Measures(
        copy_bytes_per_s=rate, host_bytes_per_s=99, network_bytes_per_s=99, step_us=step_us
    )


def noted(state: RankState, *told: Measures | None, statistics: tuple[int, ...] = (0, 0)) -> Any:
    commit = replace(commit_of(state.version), statistics=statistics)
    after = windows.note_commit(state, commit, [vote(4, one) for one in told])
    return replace(after, version=state.version + 1)


def begun(state: RankState) -> list[tuple[int, list[str]]]:
    """Return of each member the window's length, and what it copies at each version of it."""
    found = []
    for index in range(4):
        mine = windows.begin_window(replace(state, index=index))
        assert mine.window is not None
        assert mine.window.first == state.version
        found.append((mine.window.length, [" ".join(u.name for u in i) for i in mine.share]))
    return found


def test_a_window_is_as_long_as_the_job_says_and_each_unit_has_one_author() -> None:
    state = rank(snapshots=SnapshotRules(num_instalments=2, units=units()))

    assert begun(state) == [
        (2, ["0.0", "0.1"]),
        (2, ["0.3", "0.2"]),
        (2, ["1.2", "1.1"]),
        (2, ["1.0", ""]),
    ]
    assert begun(noted(state, *[measures(1)] * 4)) == begun(replace(state, version=5))


def test_before_anything_was_measured_all_is_copied_at_once() -> None:
    state = rank(snapshots=SnapshotRules(units=units()))

    assert {length for length, _ in begun(state)} == {1}
    assert windows.begin_window(rank()).window == Window(first=4, length=1)


@pytest.mark.parametrize(
    ("rates", "length"),
    [((99, 99, 99, 99), 1), ((99, 99, 8, 99), 2), ((0, 0, 8, 0), 2), ((1, 99, 99, 99), 2)],
)
def test_the_slowest_rank_of_all_says_how_long_a_window_is(
    rates: tuple[int, ...], length: int
) -> None:
    state = rank(snapshots=SnapshotRules(units=units()))
    told = noted(state, *(measures(rate) for rate in rates))

    assert {found for found, _ in begun(told)} == {length}
    # A later commit in which nobody tells anything changes nothing.
    assert {found for found, _ in begun(noted(told, None, None, None, None))} == {length}


def test_the_median_step_counts_and_a_window_is_no_longer_than_automatic_ones_may_be() -> None:
    state = rank(snapshots=SnapshotRules(units=units()))
    steps = [measures(16, step_us) for step_us in (500_000, 500_000, 1_000_000, 90_000_000)]
    assert {found for found, _ in begun(noted(state, *steps))} == {2}

    first, second = units().positions
    long_stage = tuple(replace(first[3], name=f"0.{number}") for number in range(60))
    many = replace(units(), positions=(long_stage, second))
    long = rank(snapshots=SnapshotRules(units=many))
    assert {found for found, _ in begun(noted(long, *[measures(4)] * 4))} == {MAX_AUTO_WINDOW}


def test_a_plan_whose_pods_have_no_store_measures_no_network() -> None:
    state = rank(snapshots=SnapshotRules(units=units(), peers=2))
    told = replace(measures(8), network_bytes_per_s=0)

    assert windows.num_peers(PLAN, 2) == 0
    assert {found for found, _ in begun(noted(state, *[told] * 4))} == {2}


def test_popular_experts_come_later_from_the_next_window_on() -> None:
    state = rank(snapshots=SnapshotRules(num_instalments=4, units=units()))

    def order(of: RankState) -> list[str]:
        members = [windows.begin_window(replace(of, index=index)) for index in range(2)]
        found = [unit for member in members for instalment in member.share for unit in instalment]
        return [u.name for u in sorted(found, key=lambda u: u.place)]

    assert order(state) == ["0.0", "0.1", "0.3", "0.2"]
    popular = noted(state, statistics=(9, 2))
    assert order(popular) == ["0.1", "0.0", "0.3", "0.2"]

    # Within a window nothing changes; in the next one only if the shares have changed enough.
    begins = windows.begin_window(popular)
    assert begins.basis.popularity == Popularity(ordered_by=(9, 2))
    same = noted(noted(begins, statistics=(4, 1)), statistics=(5, 1))
    assert windows.begin_window(same).basis.popularity == Popularity(ordered_by=(9, 2))
    other = noted(begins, statistics=(1, 9))
    assert order(other) == ["0.0", "0.1", "0.3", "0.2"]


def test_all_members_of_a_settle_go_on_from_the_newest_basis_and_what_came_since() -> None:
    state = rank(snapshots=SnapshotRules(units=units()))
    outcome = settle(PLAN, 1, [SettleReport(index=i, valid=False) for i in range(4)])
    told = WindowBasis(version=5, bytes_per_s=8, popularity=Popularity(running=(1, 1)))
    unnoted = replace(commit_of(5), statistics=(2, 3))
    outcome = replace(outcome, basis=told, unnoted=(unnoted,))

    assert windows.settled_basis(state, outcome) == WindowBasis(
        version=6, bytes_per_s=8, popularity=Popularity(running=(3, 4))
    )


@pytest.mark.parametrize("seed", range(40))
def test_over_a_window_the_members_copy_each_unit_once(seed: int) -> None:
    rng = random.Random(seed)
    ordering = rng.choice((Ordering.POPULARITY, Ordering.TIME_DECAYED, Ordering.BACK_TO_FRONT))
    length = rng.choice((0, 1, 2, 5))
    rules = SnapshotRules(num_instalments=length, units=units(), ordering=ordering)
    state = rank(snapshots=rules)
    for _ in range(rng.randint(0, 4)):
        told = [measures(rng.randint(1, 30)) for _ in range(4)]
        state = noted(state, *told, statistics=(rng.randint(0, 9), rng.randint(0, 9)))
    copied = [name for _, share in begun(state) for at in share for name in at.split()]
    assert sorted(copied) == [f"{s}.{n}" for s, count in enumerate(UNITS) for n in range(count)]
    assert len({length for length, _ in begun(state)}) == 1


@pytest.mark.parametrize("log", LogKind)
def test_with_boundary_logs_each_unit_is_copied_to_compute_with_until_its_turn(
    log: LogKind,
) -> None:
    types = StateTypes(compute_bytes=4, master_bytes=4, optimizer_bytes=(4, 4))
    rules = SnapshotRules(num_instalments=3, units=replace(units(), types=types), log=log)
    share = windows.begin_window(rank(snapshots=rules)).share
    turn = {unit.name: number for number, at in enumerate(share) for unit in at if unit.is_full}
    waiting = {(u.name, number) for number, at in enumerate(share) for u in at if not u.is_full}
    expected = {(name, number) for name, last in turn.items() for number in range(last)}
    assert waiting == (expected if log is LogKind.BOUNDARY else set())
    assert bool(waiting) == (log is LogKind.BOUNDARY)


def test_each_instalment_is_due_at_its_version_and_none_after_the_last() -> None:
    window = Window(first=3, length=2)
    due = [windows.due_snapshot(rank(version, window=window)) for version in range(2, 6)]

    assert due == [(), (Snapshot(3, window),), (Snapshot(4, window),), ()]
    share = ((PlacedUnit("a", 1),), (PlacedUnit("b", 0),))
    shared = rank(4, window=window, share=share)
    assert windows.due_snapshot(shared) == (Snapshot(4, window, share[1]),)
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
    late = window.last + MAX_LAG_STEPS

    waits, actions = windows.note_copies(rank(late, window=window), votes(9, 9, 5, 9))
    assert (waits.window, actions) == (window, ())

    gone, actions = windows.note_copies(rank(late + 1, window=window), votes(9, 9, 5, 9))
    assert (gone.window, actions) == (None, ())


def test_with_the_window_that_is_given_up_goes_what_has_a_gap_and_takes_the_room() -> None:
    window = Window(first=3, length=3)
    late = window.last + MAX_LAG_STEPS + 1

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
            told.append(vote(copied))
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


@pytest.mark.parametrize(
    ("told", "gradients", "states"),
    [
        ((PositionDigests("g0", "s0"), PositionDigests("g1", "s1")), ("g0", "g1"), ("s0", "s1")),
        ((), (), ()),
    ],
)
def test_the_record_of_a_rank_that_rolls_forward_has_what_reports_told_and_who_certified(
    told: tuple[PositionDigests, ...], gradients: tuple[str, ...], states: tuple[str, ...]
) -> None:
    outcome = settle(PLAN, 1, [SettleReport(index=i, valid=False) for i in range(4)])
    rolled = replace(outcome, commit=commit_of(4), certified_in="q0-m", told=told)
    (keep,) = windows.record_rolled(rank(commit_chain="before"), rolled)

    assert (keep.record.gradients, keep.record.states) == (gradients, states)
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

    told = [stayed(index) for index in range(4)]

    assert windows.catch_up(state, 0, told) == (state, ())
    assert windows.catch_up(state, 2, told) == (state, ())
    assert windows.catch_up(state, 4, told) == (replace(state, kept_from=4), (KeepFrom(2, 4),))
    assert windows.catch_up(rank(snapshots=None), 4, told)[1] == ()


@pytest.mark.parametrize(
    ("others", "kept_from"),
    [
        ([{}, {}, {}], 0),
        ([{"settled": 0}, {"settled": 0}, {}], 0),
        # Nobody here knows better: all were away, are of another lineage, or have no state.
        ([{"settled": 0}, {"lineage": 1}, {"valid": False}], 3),
    ],
)
def test_a_member_that_was_away_tells_no_more_of_windows_that_the_others_went_back_before(
    others: list[dict[str, object]], kept_from: int
) -> None:
    state = rank(kept_from=3, plan=replace(PLAN, lineage=2))
    told = [stayed(0, settled=0), *(stayed(i, **given) for i, given in enumerate(others, 1))]

    assert windows.catch_up(state, 0, told) == (replace(state, kept_from=kept_from), ())
    assert windows.catch_up(state, 4, told) == (replace(state, kept_from=4), (KeepFrom(2, 4),))


@pytest.mark.parametrize(("others", "kept_from"), [(2, 0), (1, 3), (0, 3)])
def test_of_members_that_all_were_away_those_that_settled_last_know_better(
    others: int, kept_from: int
) -> None:
    plan = replace(make_plan({0: ["a.1"], 1: ["b.1"]}, quorum=3), lineage=2)
    told = [stayed(0, settled=1), stayed(1, settled=others)]

    caught_up = windows.catch_up(rank(kept_from=3, plan=plan), 0, told)

    assert caught_up == (rank(kept_from=kept_from, plan=plan), ())


def test_a_joiner_lowers_what_its_store_keeps_from_and_a_load_voids_what_is_later() -> None:
    assert windows.go_back(rank(), 3, 0, from_disk=True) == (GoBack(0, 3, drops_later=True),)
    assert windows.go_back(rank(), 3, 0, from_disk=False) == (GoBack(0, 3, drops_later=False),)
    assert windows.go_back(rank(snapshots=None), 3, 2, from_disk=True) == ()


def test_the_store_of_who_joins_hears_which_window_is_complete() -> None:
    told = windows.go_back(rank(), 5, 4, from_disk=False)
    assert told == (GoBack(0, 5, drops_later=False), KeepFrom(0, 4))
