"""Settles in which pods' stores of segments stand in for positions that nobody holds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_replaying import (
    GRADIENT,
    STATE,
    Pod,
    key_of,
    record_of,
    twin_reach,
)

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays import replaying
from mainstay_core.rank.settle import PositionDigests, Settlement, StateAction, settle
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import SettleReport
from mainstay_core.wire.windows import WindowBasis

STAY, ROLL, HEAL = StateAction.STAY, StateAction.ROLL, StateAction.HEAL
REPLAY, LOAD = StateAction.REPLAY, StateAction.LOAD
LINEAGE = 3
# Two replicas of two stages: members 0 (a) and 1 (c) hold stage 0, 2 (b) and 3 (d) stage 1.
GRID = {0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}
OLD = dict.fromkeys(["a.1", "b.1", "c.1", "d.1"], 1)


def grid(**since: int) -> Plan:
    renamed = {f"{pod}.1": first for pod, first in since.items()}
    plan = make_plan(GRID, quorum=2, since={**OLD, **renamed}, shards_per_lane=2)
    return replace(plan, lineage=LINEAGE)


def member(index: int, version: int, **fields: object) -> SettleReport:
    given: dict[str, object] = {
        "valid": True,
        "lineage": LINEAGE,
        "settled": 1,
        "certified_in": "q1-n",
        "commit": record_of(version - 1).commit,
        "chain": f"{version - 1:032x}",
    }
    return SettleReport(index=index, version=version, **(given | fields))  # type: ignore[arg-type]


def lost(index: int, **fields: object) -> SettleReport:
    return SettleReport(index=index, valid=False, **fields)  # type: ignore[arg-type]


def store(name: str, position: int, states: Sequence[int], last: int, first: int = 0) -> Pod:
    """A store with both units of a position at some versions, and the steps up to ``last``."""
    pod = Pod(name, num_units=2, records=set(range(first, last + 1)))
    for unit, version in zip((0, 1), states, strict=True):
        pod.segments.add(key_of(position, unit, STATE, version))
        steps = range(first, last + 1)
        pod.segments |= {key_of(position, unit, GRADIENT, step) for step in steps}
    return pod


def settled(plan: Plan, reports: Sequence[SettleReport], *pods: Pod) -> Settlement:
    return settle(plan, 2, reports, [pod.report() for pod in pods])


def test_a_lost_stage_is_made_anew_at_the_survivors_version_and_nothing_is_lost() -> None:
    reports = [member(0, 7), member(1, 7), lost(2), lost(3)]

    outcome = settled(grid(), reports, store("a", 1, (4, 5), 6, first=4))

    assert (outcome.version, outcome.actions) == (7, (STAY, STAY, REPLAY, REPLAY))
    assert set(outcome.replays) == {1}
    assert [unit.state.version for unit in outcome.replays[1].units] == [4, 5]
    assert [r.commit.step for r in outcome.replays[1].records] == [4, 5, 6]
    assert outcome.sources == ((),) * 4
    assert (outcome.certified_in, outcome.commit_chain) == ("q1-n", f"{6:032x}")
    assert outcome.reason == "step 7 from the members that stayed: 2 stay, 2 replay"


@pytest.mark.parametrize(
    ("reports", "kept_from"),
    [
        # The second one has missed the votes with which the window from 4 on was complete.
        ([member(0, 6, kept_from=4), member(1, 6), member(2, 6), member(3, 6)], 4),
        ([member(0, 6, kept_from=4), member(1, 6, kept_from=2), member(2, 6), lost(3)], 4),
        # A position is made anew from states at version 4, which may be older than that.
        ([member(0, 6, kept_from=4), member(1, 6, kept_from=2), lost(2), lost(3)], 4),
        ([member(0, 6, kept_from=5), member(1, 6, kept_from=5), lost(2), lost(3)], 0),
        # It was away: the others may have gone back since.
        ([member(0, 6), member(1, 6, kept_from=9), member(2, 6), member(3, 6)], 0),
        ([member(0, 6, lineage=1, kept_from=9), lost(1), lost(2), lost(3)], 0),
    ],
)
def test_members_tell_each_other_from_where_on_segments_are_needed(
    reports: list[SettleReport], kept_from: int
) -> None:
    outcome = settled(grid(c=2), reports, store("c", 1, [4, 4], last=5))

    assert outcome.kept_from == kept_from


def test_who_missed_that_all_went_back_tells_of_no_window_that_they_have_given_up() -> None:
    """All have settled in quorum 2 and loaded version 8 but for one, whom no reports reached."""
    plan = make_plan(GRID, quorum=3, since={**OLD, "b.1": 2, "d.1": 2}, shards_per_lane=2)
    others = [member(index, 8, settled=2) for index in (1, 2, 3)]

    outcome = settled(replace(plan, lineage=LINEAGE), [member(0, 12, kept_from=10), *others])

    assert (outcome.version, outcome.actions) == (8, (HEAL, STAY, STAY, STAY))
    assert outcome.kept_from == 0


def test_the_types_of_a_survivor_count_and_chains_that_replay_compute_afterwards() -> None:
    held = (Partial(lane=0, first=0, last=1),)
    reports = [member(0, 7, held=held, held_in=2), member(1, 7), lost(2), lost(3)]

    outcome = settled(grid(), reports, store("a", 1, (4, 5), 6, first=4))

    assert outcome.step.todo == {0: (0, 1), 1: (2, 3)}, "no position has the types but stage 0"


def test_a_member_that_healed_in_the_lost_stage_before_is_healed_from_and_no_store_counts() -> None:
    reports = [member(0, 7), member(1, 7), lost(2), member(3, 7)]

    outcome = settled(grid(), reports)

    assert outcome.actions == (STAY, STAY, HEAL, STAY)
    assert (outcome.sources[2], outcome.replays) == ((3,), {})


def test_when_all_are_lost_the_newest_version_whose_commits_stores_know_is_made_anew() -> None:
    pods = store("a", 0, (4, 4), 7, first=4), store("c", 1, (4, 5), 6, first=4)
    pods[0].records.discard(7)

    outcome = settled(grid(), [lost(i, durable=2) for i in range(4)], *pods)

    assert (outcome.version, outcome.actions) == (7, (REPLAY,) * 4)
    assert set(outcome.replays) == {0, 1}
    assert outcome.commit == record_of(6).commit
    assert (outcome.certified_in, outcome.commit_chain) == ("q1-n", f"{6:032x}")
    assert outcome.reason == "step 7 from segments alone: 4 replay"


def test_a_checkpoint_that_is_newer_than_what_stores_reach_is_loaded() -> None:
    pods = store("a", 0, (4, 4), 6, first=4), store("c", 1, (4, 4), 6, first=4)
    absent = [lost(i, durable=version) for i, version in enumerate((2, 8, 0, 2))]

    assert settled(grid(), absent, *pods).actions == (LOAD,) * 4
    assert settled(grid(), absent, *pods).version == 8
    assert settled(grid(), [lost(i, durable=7) for i in range(4)], *pods).version == 7
    replayed = settled(grid(), [lost(i, durable=7) for i in range(4)], *pods)
    assert replayed.actions == (REPLAY,) * 4, "the disk has no more, and memory is nearer"


def test_a_version_whose_last_commit_nobody_knows_is_not_settled_on() -> None:
    # The states are there, but the next commit would begin its totals anew.
    pods = store("a", 0, (4, 4), 3, first=4), store("c", 1, (4, 4), 3, first=4)
    pods[0].records.add(4)
    absent = [lost(i, durable=2) for i in range(4)]

    assert settled(grid(), absent, *pods).actions == (LOAD,) * 4
    assert settled(grid(), absent, *pods).version == 2
    pods[1].records.add(3)
    assert settled(grid(), absent, *pods).version == 4
    told = settled(grid(), [member(0, 4), *absent[1:]], pods[0], store("c", 1, (4, 4), 3, first=4))
    assert (told.version, told.actions) == (4, (STAY, HEAL, REPLAY, REPLAY))


def test_stores_that_do_not_reach_lead_to_the_checkpoint_and_the_reason_names_the_gap() -> None:
    reports = [member(0, 7, durable=4), member(1, 7), lost(2), lost(3)]
    pod = store("a", 1, (4, 5), 6, first=4)
    pod.segments.remove(key_of(1, 1, GRADIENT, 5))

    outcome = settled(grid(), reports, pod)

    assert (outcome.version, outcome.actions, outcome.replays) == (4, (LOAD,) * 4, {})
    assert "unit block1 of position 1 does not reach version 7" in outcome.reason
    assert "states at [5]" in outcome.reason


def test_the_reason_names_the_pods_whose_stores_could_not_be_asked() -> None:
    reports = [member(0, 7, durable=4), member(1, 7), lost(2), lost(3)]
    silent = StoreReport(
        pod=PodUid("s"), address="", lineage=LINEAGE, problem="it did not answer within 5 s"
    )

    outcome = settle(grid(), 2, reports, [silent])
    assert "no store holds anything of position 1" in outcome.reason
    assert (
        "not all is known of what the store of s holds: it did not answer within 5 s"
        in outcome.reason
    )
    found = settle(grid(), 2, reports, [silent, store("a", 1, (4, 5), 6, first=4).report()])
    assert found.version == 7


def test_a_step_that_survivors_have_not_applied_is_not_made_anew_past_them() -> None:
    reports = [member(0, 6), member(1, 6), lost(2), lost(3)]

    outcome = settled(grid(), reports, store("a", 1, (4, 5), 6, first=4))

    assert outcome.version == 6
    assert outcome.replays[1].version == 6


def test_survivors_that_hold_the_mark_roll_forward_to_a_rank_that_has_the_step() -> None:
    reports = [member(0, 7), member(1, 6, mark="q1-n"), lost(2), lost(3)]

    outcome = settled(grid(), reports, store("a", 1, (4, 5), 6, first=4))

    assert (outcome.version, outcome.actions) == (7, (STAY, ROLL, REPLAY, REPLAY))


APPLIED = {"last_gradient": "g0", "last_masters": "s0"}
MARKED = {"mark": "q1-n", "mark_gradient": "g1", "state": "s1", "last_gradient": "older"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, (PositionDigests("g0", "s0"), PositionDigests("g1", "s1"))),
        # Member 1 is of position 0, too: it has rolled forward before, and does not know.
        ({1: {"last_gradient": ""}}, (PositionDigests("g0", "s0"), PositionDigests("g1", "s1"))),
        ({1: {"last_gradient": "other"}}, ()),
        ({3: {"mark_gradient": "other"}}, ()),
        ({2: {"mark_gradient": ""}, 3: {"mark_gradient": ""}}, ()),
        # Of a mark that nobody certified its gradient says nothing of the commit.
        ({3: {"mark": "q0-n"}}, (PositionDigests("g0", "s0"), PositionDigests("g1", "s1"))),
    ],
)
def test_reports_tell_what_the_votes_on_the_last_commit_said_of_each_position(
    changes: dict[int, dict[str, object]], told: tuple[PositionDigests, ...]
) -> None:
    fields = [(7, APPLIED), (7, APPLIED), (6, MARKED), (6, MARKED)]
    reports = [
        member(i, version, **(given | changes.get(i, {})))
        for i, (version, given) in enumerate(fields)
    ]

    outcome = settled(grid(), reports)

    assert (outcome.version, outcome.actions[2]) == (7, ROLL)
    assert outcome.told == told


def test_a_store_that_knows_the_votes_on_the_last_commit_speaks_for_all_positions() -> None:
    reports = [member(0, 7, **APPLIED), member(1, 7), lost(2), lost(3)]
    known = record_of(6)

    outcome = settled(grid(), reports, store("a", 1, (4, 5), 6, first=4))

    assert outcome.told == tuple(map(PositionDigests, known.gradients, known.states))


def test_of_a_checkpoints_version_nothing_is_told() -> None:
    assert settled(grid(), [lost(i, durable=2) for i in range(4)]).told == ()


@pytest.mark.parametrize(("version", "action"), [(7, STAY), (6, HEAL), (8, HEAL)])
def test_a_returning_rank_of_a_lost_stage_stays_only_at_the_version(
    version: int, action: StateAction
) -> None:
    plan = grid(b=2, d=2)
    reports = [member(0, 7), member(1, 7), member(2, version), lost(3)]

    outcome = settled(plan, reports, store("a", 1, (4, 5), 6, first=4))

    assert outcome.version == 7
    if action is STAY:  # the others copy it: that is less work than a replay
        assert outcome.actions == (STAY, STAY, STAY, HEAL)
        assert (outcome.sources[3], outcome.replays) == ((2,), {})
    else:
        assert outcome.actions == (STAY, STAY, REPLAY, REPLAY)


def test_the_next_window_is_planned_from_the_newest_report_and_the_commits_since() -> None:
    newest = WindowBasis(version=6, bytes_per_s=7)
    reports = [member(0, 7, basis=WindowBasis(version=5)), member(1, 7, basis=newest)]
    stores = store("a", 1, (4, 5), 6, first=4)

    outcome = settled(grid(), [*reports, lost(2), lost(3)], stores)
    assert outcome.basis == newest
    assert [commit.step for commit in outcome.unnoted] == [6]


def test_where_no_report_tells_of_windows_all_commits_of_stores_count() -> None:
    outcome = settled(grid(), [lost(i) for i in range(4)], store("a", 1, (4, 5), 6, first=4))

    assert outcome.basis == WindowBasis()
    known = [commit.step for commit in outcome.unnoted]
    assert known == list(range(outcome.version))[-len(known) :]


def random_settle(rng: random.Random) -> tuple[Plan, list[SettleReport], list[Pod]]:
    top = rng.randint(4, 7)
    plan = grid(**{pod: 2 for pod in "abcd" if rng.random() < 0.3})
    reports = []
    for index in range(4):
        if rng.random() < 0.6:
            reports.append(lost(index, durable=rng.choice((0, 2, 3))))
        else:
            reports.append(member(index, rng.randint(top - 1, top)))
    pods = []
    for name in "abcd"[: rng.randint(1, 4)]:
        pod = Pod(name, num_units=2, records=set(range(3, top)))
        for position, unit in itertools.product(range(2), range(2)):
            state = rng.randint(3, top)
            pod.segments.add(key_of(position, unit, STATE, state))
            some = {s for s in range(3, top + 1) if rng.random() < 0.9}
            pod.segments |= {key_of(position, unit, GRADIENT, step) for step in some}
        pods.append(pod)
    return plan, reports, pods


def twin_version(plan: Plan, reports: Sequence[SettleReport], pods: Sequence[Pod]) -> int | None:
    """Return the newest version to which every position can come; None if that is the disk's."""
    stayed = [r for r in reports if r.settled >= plan.members[r.index].since]
    for trusted in (stayed, list(reports)):
        for version in range(10, -1, -1):
            told = [r for r in trusted if r.valid and r.version == version]
            record = any(version - 1 in pod.records for pod in pods)
            if (told or record or version == 0) and all(
                (
                    {r.version for r in trusted if r.valid and r.index in indices}
                    and any(r.index in indices for r in told)
                )
                or (
                    not any(r.valid and r.index in indices for r in trusted)
                    and version in twin_reach(pods, position, 10)
                )
                for position, indices in enumerate([(0, 1), (2, 3)])
            ):
                return version
    return None


@pytest.mark.parametrize("seed", range(30))
def test_settles_with_stores_equal_their_twin_in_whatever_order_all_is_told(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        plan, reports, pods = random_settle(rng)
        told = [pod.report() for pod in pods]
        outcome = settle(plan, 2, reports, told)

        assert outcome == settle(
            plan, 2, rng.sample(reports, len(reports)), rng.sample(told, len(told))
        )
        version = twin_version(plan, reports, pods)
        if version is None:
            assert set(outcome.actions) == {LOAD}
            continue
        assert outcome.version == version
        assert LOAD not in outcome.actions
        for position, indices in enumerate([(0, 1), (2, 3)]):
            actions = {outcome.actions[i] for i in indices}
            assert (actions == {REPLAY}) == (position in outcome.replays)
            assert actions == {REPLAY} or STAY in actions


def test_without_stores_a_settle_is_what_it_was() -> None:
    rng = random.Random(7)
    for _ in range(50):
        plan, reports, _ = random_settle(rng)
        outcome = settle(plan, 2, reports)

        assert outcome.replays == {}
        assert REPLAY not in outcome.actions
        empty = [StoreReport(pod=m.slot.pod, address="", lineage=LINEAGE) for m in plan.members]
        again = settle(plan, 2, reports, empty)
        assert replace(again, reason=outcome.reason) == outcome


def test_a_stage_that_answers_from_memory_is_asked_for_by_the_same_reports() -> None:
    for seed in range(40):
        plan, reports, pods = random_settle(random.Random(seed))
        outcome = settled(plan, reports, *pods)

        assert not outcome.replays or replaying.needs_stores(plan, reports)
