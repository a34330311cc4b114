"""Settle against a twin written from protocol section 6, and that section's cases as sentences."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.copies import Makers, twin_kept, types_in

from mainstay_core.base import codec
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.rank.steps.step_plan import StepPlan, plan_step
from mainstay_core.rank.votes import Verdict, judge_reports
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.votes import Commit, MadeType, SettleReport

STAY, ROLL, HEAL, LOAD = StateAction.STAY, StateAction.ROLL, StateAction.HEAL, StateAction.LOAD


# The twin -------------------------------------------------------------------


def can_be_at(
    report: SettleReport, version: int, lineage: int, trusted: Sequence[SettleReport]
) -> bool:
    """Whether a rank is at ``version``, or may apply its mark on a certificate of ``trusted``."""
    if not report.valid or report.lineage != lineage:
        return False
    if report.version == version:
        return True
    if report.mark is None or report.version + 1 != version:
        return False
    wanted = (lineage, version, report.mark)
    return any(t.valid and (t.lineage, t.version, t.certified_in) == wanted for t in trusted)


def newest_version(plan: Plan, trusted: Sequence[SettleReport]) -> int | None:
    """Highest version, tried from above, that each inner rank of a stage has somebody for."""
    positions = {(m.rank.stage, m.rank.inner) for m in plan.members}
    for version in range(max((r.version for r in trusted), default=0) + 1, -1, -1):
        if all(
            any(
                can_be_at(r, version, plan.lineage, trusted)
                for r in trusted
                if (plan.members[r.index].rank.stage, plan.members[r.index].rank.inner) == position
            )
            for position in positions
        ):
            return version
    return None


def twin_version(
    plan: Plan, reports: Sequence[SettleReport]
) -> tuple[int, list[StateAction], list[SettleReport]]:
    stayed = [r for r in reports if r.settled >= plan.members[r.index].since]
    for trusted in (stayed, list(reports)):
        version = newest_version(plan, trusted)
        if version is not None:
            break
    otherwise = HEAL
    if version is None:
        version, otherwise = max(r.durable for r in reports), LOAD
    actions = []
    for report in sorted(reports, key=lambda r: r.index):
        if otherwise is LOAD or not can_be_at(report, version, plan.lineage, trusted):
            actions.append(otherwise)
        else:
            actions.append(STAY if report.version == version else ROLL)
    return version, actions, trusted


def twin_partials(
    partials: Sequence[Partial], computed: Sequence[int], shards_per_lane: int
) -> list[list[int]]:
    """Partials as lists of types, after computing: leading runs of a lane are extended."""
    lists = [list(range(p.first, p.last + 1)) for p in partials]
    for t in computed:
        for types in lists:
            if types[0] % shards_per_lane == 0 and types[-1] == t - 1 and t % shards_per_lane:
                types.append(t)
                break
        else:
            lists.append([t])
    return lists


def twin_step(
    plan: Plan,
    shards_per_lane: int,
    held: dict[int, tuple[Partial, ...]],
    healing: set[int],
    makers: Makers,
    bad: set[int],
) -> tuple[dict[int, list[int]], list[list[tuple[int, list[int]]]]]:
    """Lists by replica, and per position (sender, types) in order of summation."""
    num_types = len(plan.suppliers)
    where = sorted({(m.rank.stage, m.rank.inner) for m in plan.members})
    positions = range(len(where))
    at = [[m.index for m in plan.members if (m.rank.stage, m.rank.inner) == w] for w in where]
    fit = [c for c in plan.chains if not healing & set(c.cells)] or list(plan.chains)
    todo: dict[int, list[int]] = {c.replica: [] for c in fit}
    orphans = []
    kept, counted = twin_kept(plan, held, makers, bad)
    for t in range(num_types):
        if t in counted:
            continue
        if plan.suppliers[t] in todo:
            todo[plan.suppliers[t]].append(t)
        else:
            orphans.append(t)
    for t in orphans:
        least = min(len(types) for types in todo.values())
        todo[min(r for r in todo if len(todo[r]) == least)].append(t)
    for replica, types in todo.items():
        own = [t for t in types if t // shards_per_lane == replica]
        todo[replica] = sorted(own) + sorted(set(types) - set(own))
    replica_of = {m.index: -1 for m in plan.members} | {
        i: c.replica for c in plan.chains for i in c.cells
    }
    tables = []
    for w in positions:
        holdings = {
            i: twin_partials(
                kept[i],
                todo.get(replica_of[i], []),
                shards_per_lane,
            )
            for i in at[w]
        }
        table: list[tuple[int, list[int]]] = []
        for lane in range(num_types // shards_per_lane):
            in_order = sorted(at[w], key=lambda i: (replica_of[i] != lane, i))
            t, end = lane * shards_per_lane, (lane + 1) * shards_per_lane
            while t < end:
                # The longest of those that begin here; among equals the first of the order.
                offers = [(i, types) for i in in_order for types in holdings[i] if types[0] == t]
                best = max(offers, key=lambda o: len(o[1]))
                table.append(best)
                t = best[1][-1] + 1
        tables.append(table)
    return todo, tables


# Random cases ---------------------------------------------------------------


def random_partials(rng: random.Random, lanes: int, shards_per_lane: int) -> tuple[Partial, ...]:
    held = []
    for lane in range(lanes):
        first = lane * shards_per_lane
        run = rng.randint(0, shards_per_lane)
        if run:
            held.append(Partial(lane=lane, first=first, last=first + run - 1))
        held += [
            Partial(lane=lane, first=t, last=t)
            for t in range(first + run + 1, first + shards_per_lane)
            if rng.random() < 0.4
        ]
    return tuple(held)


def random_commit(step: int) -> Commit:
    return Commit(step=step, norm=1.0, scale=0.5, tokens=8, loss=3.0, data="0" * 32)


def random_case(rng: random.Random) -> tuple[Plan, int, list[SettleReport]]:
    num_stages, inner = rng.choice([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3)])
    positions, shards_per_lane = num_stages * inner, rng.randint(1, 4)
    lanes = rng.randint(1, 4)
    replicas = sorted(rng.sample(range(lanes), rng.randint(1, lanes)))
    chains = {r: [f"{'abcd'[r]}{s}.1" for s in range(positions)] for r in replicas}
    followers = [(f"f{i}.1", rng.randrange(positions)) for i in range(rng.choice([0, 0, 1, 2]))]
    lives = [life for cells in chains.values() for life in cells] + [f for f, _ in followers]
    plan = make_plan(
        chains,
        followers=followers,
        ranks_per_stage=inner,
        lanes=lanes,
        shards_per_lane=shards_per_lane,
        quorum=9,
        since={life: rng.choice([2, 2, 2, 5, 9]) for life in lives},
    )
    low, odd = rng.randint(0, 3), rng.choice((0.0, 0.0, 0.2))
    num_types = lanes * shards_per_lane
    quorums = [f"q{i}-n" for i in range(5, 8)]
    reports = []
    for member in plan.members:
        version = low + rng.choice([0, 0, 0, 0, 1, 1, 2])
        certified = rng.choice(quorums) if version and rng.random() < 0.9 else None
        held = random_partials(rng, lanes, shards_per_lane)
        report = SettleReport(
            index=member.index,
            valid=rng.random() < 0.85,
            lineage=int(rng.random() < 0.05),
            version=version,
            certified_in=certified,
            commit=random_commit(version - 1) if certified else None,
            chain=f"chain of {version}",
            state=f"state of {version} in {member.rank.stage}.{member.rank.inner}",
            held=held,
            made=tuple(
                MadeType(type=t, quorum=7 - (rng.random() < odd), replica=t % lanes)
                for p in held
                for t in types_in(p)
            ),
            bad=tuple(t for t in range(num_types) if rng.random() < odd / 10),
            mark=rng.choice([None, None, *quorums]),
            settled=rng.choice([-1, 4, 8, 8, 8]),
            durable=rng.choice([0, 0, 2]),
        )
        reports.append(report)
    return plan, shards_per_lane, reports


def check_step(plan: Plan, step: StepPlan, shards_per_lane: int) -> None:
    """What every step must be like: each type once per position, in canonical order."""
    where = sorted({(m.rank.stage, m.rank.inner) for m in plan.members})
    for position, table in zip(where, step.table, strict=True):
        counted = [t for s in table for t in range(s.partial.first, s.partial.last + 1)]
        assert counted == list(range(len(plan.suppliers)))
        for supply in table:
            sender = plan.members[supply.index].rank
            assert (sender.stage, sender.inner) == position
            assert supply.partial.lane == supply.partial.first // shards_per_lane
            assert supply.partial.lane == supply.partial.last // shards_per_lane
    computed = [t for types in step.todo.values() for t in types]
    assert len(computed) == len(set(computed))
    assert set(step.todo) <= {c.replica for c in plan.chains}


def check_against_twin(plan: Plan, shards_per_lane: int, reports: list[SettleReport]) -> Settlement:
    outcome = settle(plan, shards_per_lane, reports)
    version, actions, trusted = twin_version(plan, reports)
    assert (outcome.version, list(outcome.actions)) == (version, actions)
    held = {r.index: r.held for r in reports if actions[r.index] is STAY}
    healing = {i for i, action in enumerate(actions) if action is HEAL}
    makers = {r.index: {m.type: (m.quorum, m.replica) for m in r.made} for r in reports}
    bad = {t for r in reports if r.version == version for t in r.bad}
    todo, tables = twin_step(plan, shards_per_lane, held, healing, makers, bad)
    assert {r: list(types) for r, types in outcome.step.todo.items()} == todo
    assert [
        [(s.index, list(range(s.partial.first, s.partial.last + 1))) for s in table]
        for table in outcome.step.table
    ] == tables
    check_step(plan, outcome.step, shards_per_lane)
    for index, action in enumerate(actions):
        check_action(plan, outcome, index, action, trusted)
    return outcome


def check_action(
    plan: Plan,
    outcome: Settlement,
    index: int,
    action: StateAction,
    trusted: Sequence[SettleReport],
) -> None:
    sources = outcome.sources[index]
    if action is ROLL:
        assert outcome.commit is not None
        assert outcome.commit.step == outcome.version - 1
        assert outcome.commit_chain == f"chain of {outcome.version}"
        assert outcome.certified_in in {
            r.certified_in for r in trusted if r.version == outcome.version
        }
    if action is not HEAL:
        assert sources == ()
        return
    assert sources, "whoever heals has a source"
    assert {plan.members[i].rank.position for i in sources} == {plan.members[index].rank.position}
    assert all(outcome.actions[i] in (STAY, ROLL) for i in sources)
    assert len(set(sources)) == len(sources)
    chain = plan.chain_of(index)
    if chain and any(not set(outcome_healing(outcome)) & set(c.cells) for c in plan.chains):
        assert not outcome.step.todo.get(chain.replica)


def outcome_healing(outcome: Settlement) -> list[int]:
    return [i for i, action in enumerate(outcome.actions) if action is HEAL]


@pytest.mark.parametrize("seed", range(8))
def test_settle_equals_its_twin_on_random_reports(seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for _ in range(500):
        outcome = check_against_twin(*random_case(rng))
        seen |= set(outcome.actions)
    assert seen == {STAY, ROLL, HEAL, LOAD}


def test_settle_ignores_the_order_of_reports_and_what_travels_is_enough() -> None:
    """Every rank decodes the same bytes, in its own order: all come to the same answer."""
    rng = random.Random(100)
    for _ in range(500):
        plan, shards_per_lane, reports = random_case(rng)
        expected = settle(plan, shards_per_lane, reports)
        for _ in range(3):
            shuffled = rng.sample(reports, len(reports))
            theirs = [codec.loads(SettleReport, codec.dumps(r)) for r in shuffled]
            their_plan = codec.loads(Plan, codec.dumps(plan))

            assert settle(their_plan, shards_per_lane, theirs) == expected


# Copies of one state against each other ---------------------------------------


def twin_verdict(
    plan: Plan, actions: Sequence[StateAction], digests: Mapping[int, str]
) -> tuple[set[int], bool]:
    """Members whose state is bad, and whether some position has nobody to believe: by trying each
    digest for the right one."""
    bad: set[int] = set()
    undecided = False
    for position in {m.rank.position for m in plan.members}:
        here = [m.index for m in plan.members if m.rank.position == position]
        told = [digests[i] for i in here if actions[i] is STAY]
        right = [
            tried
            for tried in set(told)
            if all(told.count(tried) > told.count(other) for other in set(told) - {tried})
        ]
        if not told or len(set(told)) == 1:
            continue
        if right:
            bad |= {i for i in here if actions[i] is STAY and digests[i] != right[0]}
        elif not any(actions[i] is ROLL for i in here):
            bad |= {i for i in here if actions[i] is STAY}
            undecided = True
    return bad, undecided


def judged(plan: Plan, reports: Sequence[SettleReport]) -> Verdict:
    return judge_reports(plan, reports, settle(plan, 2, reports).actions)


@pytest.mark.parametrize("seed", range(4))
def test_the_states_of_a_settle_are_judged_as_their_twin_judges_them(seed: int) -> None:
    rng = random.Random(200 + seed)
    seen = set()
    for _ in range(500):
        plan, shards_per_lane, reports = random_case(rng)
        reports = [replace(r, state=rng.choice("aaab" + "c" * (seed % 2))) for r in reports]
        outcome = settle(plan, shards_per_lane, reports)
        verdict = judge_reports(plan, rng.sample(reports, len(reports)), outcome.actions)
        bad, undecided = twin_verdict(plan, outcome.actions, {r.index: r.state for r in reports})
        assert (set(verdict.state_bad), verdict.undecided) == (bad, undecided)
        named = {plan.members[i].slot for i in bad}
        assert set(verdict.differing) == (set() if undecided else named)
        seen.add((bool(bad), undecided))
    assert seen == {(False, False), (True, False), (True, True)}


def copies_of(outcome: Settlement, index: int, held: Mapping[int, str]) -> set[str]:
    """All that a joiner may end with, whichever of its sources die on the way: it takes a copy of
    the expected digest, or one that two sources gave, or that of its only source."""
    given = [held[i] for i in outcome.sources[index]]
    expected = outcome.expected[index]
    if expected:
        return {copy for copy in given if copy == expected}
    return set(given) if len(given) == 1 else {copy for copy in given if given.count(copy) > 1}


def test_no_joiner_takes_the_one_bad_copy_where_there_is_another_or_it_is_found() -> None:
    """Every mix of who stays, rolls and heals at one position, with one bad copy at each place: it
    was made bad by the apply of that version, in this settle or before it."""
    for size in range(2, 5):
        plan = make_plan({r: [f"{'abcd'[r]}.1", f"{'wxyz'[r]}.1"] for r in range(size)}, quorum=2)
        plan = replace(plan, members=tuple(replace(m, since=1) for m in plan.members))
        others = [member(m.index, 6, state="other") for m in plan.positions[1]]
        for ways in itertools.product((STAY, ROLL, HEAL), repeat=size):
            copies = [i for i, way in enumerate(ways) if way is not HEAL]
            for wrong in copies if len(copies) > 1 else ():
                held = {i: "bad" if i == wrong else "good" for i in copies}
                reports = [
                    member(i, 6, state=held[i])
                    if way is STAY
                    else member(i, 5, mark="q1-n", state="before")
                    if way is ROLL
                    else SettleReport(index=i, valid=False)
                    for i, way in enumerate(ways)
                ]
                outcome = settle(plan, 1, [*reports, *others])
                assert outcome.actions[:size] == ways
                verdict = judge_reports(plan, [*reports, *others], outcome.actions)
                if verdict.state_bad:
                    assert verdict.undecided or verdict.state_bad == (wrong,)
                    continue
                for index in (i for i, way in enumerate(ways) if way is HEAL):
                    assert copies_of(outcome, index, held) <= {"good"}, (ways, wrong)


def test_settle_refuses_missing_doubled_and_foreign_reports() -> None:
    plan = make_plan({0: ["a.1", "b.1"]})
    reports = [SettleReport(index=0, valid=False), SettleReport(index=1, valid=False)]

    for wrong in (reports[:1], [*reports, reports[0]], [reports[0], reports[0]], []):
        with pytest.raises(LocalProtocolError, match="one report of each of 2 members"):
            settle(plan, 1, wrong)


def test_a_plan_without_a_whole_replica_is_refused() -> None:
    plan = make_plan({}, followers=[("a.1", 0), ("b.1", 1)], lanes=2)

    with pytest.raises(LocalProtocolError, match="without a whole replica"):
        plan_step(plan, 1)


# Cases of the protocol ------------------------------------------------------
# Two replicas of two stages: members 0 (a) and 1 (c) hold stage 0, 2 (b) and 3 (d) stage 1.

GRID = {0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}
OLD = dict.fromkeys(["a.1", "b.1", "c.1", "d.1"], 1)


def grid(quorum: int = 2, **arguments: object) -> Plan:
    given: dict[str, object] = {"chains": GRID, "since": OLD, "shards_per_lane": 2}
    return make_plan(**(given | {"quorum": quorum} | arguments))  # type: ignore[arg-type]


def member(index: int, version: int, **fields: object) -> SettleReport:
    """A member that stayed, at ``version``, certified in the quorum before."""
    given: dict[str, object] = {
        "valid": True,
        "settled": 1,
        "certified_in": "q1-n" if version else None,
        "commit": random_commit(version - 1) if version else None,
        "chain": f"chain of {version}",
    }
    return SettleReport(index=index, version=version, **(given | fields))  # type: ignore[arg-type]


def all_held(lane: int) -> tuple[Partial, ...]:
    return (Partial(lane=lane, first=2 * lane, last=2 * lane + 1),)


def test_a_vote_that_completed_on_one_rank_which_lives_makes_all_others_roll() -> None:
    reports = [member(0, 6), *(member(i, 5, mark="q1-n") for i in (1, 2, 3))]

    outcome = settle(grid(), 2, reports)

    assert (outcome.version, outcome.actions) == (6, (STAY, ROLL, ROLL, ROLL))
    assert (outcome.commit, outcome.certified_in) == (random_commit(5), "q1-n")
    assert outcome.commit_chain == "chain of 6"


def test_a_vote_that_completed_on_one_rank_which_is_gone_makes_the_others_redo_the_step() -> None:
    plan = grid(chains={1: ["c.1", "d.1"]}, followers=[("b.1", 1)], lanes=2)
    reports = [member(i, 5, mark="q1-n", held=all_held(1)) for i in (0, 1)]
    reports.append(member(2, 5, mark="q1-n", held=all_held(0)))

    outcome = settle(plan, 2, reports)

    assert (outcome.version, set(outcome.actions)) == (5, {STAY})
    assert outcome.step.todo == {1: (0, 1)}, "only what stage 0 lost, through both stages"


def test_nothing_is_rolled_on_a_certificate_of_another_quorum() -> None:
    reports = [member(0, 6, certified_in="q1-n"), *(member(i, 5, mark="q0-n") for i in (1, 2, 3))]

    outcome = settle(grid(), 2, reports)

    assert (outcome.version, outcome.actions) == (5, (HEAL, STAY, STAY, STAY))


def test_one_rank_per_stage_with_the_mark_is_enough_the_others_heal() -> None:
    reports = [member(0, 6), member(1, 5), member(2, 5, mark="q1-n"), member(3, 5)]

    outcome = settle(grid(), 2, reports)

    assert outcome.actions == (STAY, HEAL, ROLL, HEAL)
    assert outcome.sources == ((), (0,), (), (2,))


def test_a_certificate_of_a_returning_rank_does_not_make_those_that_stayed_roll() -> None:
    plan = grid(since={**OLD, "a.1": 2})
    reports = [member(0, 6), *(member(i, 5, mark="q1-n") for i in (1, 2, 3))]

    outcome = settle(plan, 2, reports)

    assert (outcome.version, outcome.actions) == (5, (HEAL, STAY, STAY, STAY))


def test_returning_ranks_count_once_those_that_stayed_do_not_cover_a_stage() -> None:
    plan = grid(since={**OLD, "a.1": 2, "c.1": 2})
    reports = [member(0, 6), member(1, 4), member(2, 5, mark="q1-n"), member(3, 5)]

    outcome = settle(plan, 2, reports)

    assert (outcome.version, outcome.actions) == (6, (STAY, HEAL, ROLL, HEAL))
    assert "returning members" in outcome.reason


def test_a_returning_rank_that_is_at_the_version_needs_no_copy() -> None:
    plan = grid(since={**OLD, "a.1": 2})

    outcome = settle(plan, 2, [member(i, 5) for i in range(4)])

    assert set(outcome.actions) == {STAY}


def test_a_member_since_a_later_quorum_stayed_only_if_it_settled_in_it() -> None:
    plan = grid(quorum=5, since={**OLD, "a.1": 4})
    settled_in_it = [member(i, 5, mark="q4-n") for i in (1, 2, 3)]
    ahead = {"version": 6, "certified_in": "q4-n", "commit": random_commit(5)}

    stayed = settle(plan, 2, [replace(member(0, 5), settled=4, **ahead), *settled_in_it])
    returned = settle(plan, 2, [replace(member(0, 5), settled=3, **ahead), *settled_in_it])

    assert (stayed.version, returned.version) == (6, 5)


def test_without_any_copy_of_a_stage_all_go_to_the_newest_durable_version() -> None:
    reports = [
        SettleReport(index=0, valid=False, durable=4),
        SettleReport(index=1, valid=False, durable=2),
        member(2, 7),
        member(3, 4, certified_in=None, commit=None),
    ]

    outcome = settle(grid(), 2, reports)

    assert (outcome.version, outcome.actions) == (4, (LOAD,) * 4), (
        "nobody has judged the old copy of member 3"
    )
    assert "durable" in outcome.reason


def test_a_new_job_starts_from_the_seed() -> None:
    outcome = settle(grid(), 2, [SettleReport(index=i, valid=False) for i in range(4)])

    assert (outcome.version, set(outcome.actions), outcome.commit_chain) == (0, {LOAD}, "")
    assert outcome.step.todo == {0: (0, 1), 1: (2, 3)}
    assert "computed again" not in outcome.reason


def test_a_state_of_another_lineage_counts_for_nothing() -> None:
    reports = [replace(member(i, 5), lineage=1 if i == 0 else 0) for i in range(4)]

    outcome = settle(grid(), 2, reports)

    assert outcome.actions == (HEAL, STAY, STAY, STAY)


def test_a_history_of_another_lineage_is_never_the_settled_one() -> None:
    foreign = replace(member(0, 5), lineage=1, chain="another history", certified_in="q0-n")

    outcome = settle(grid(), 2, [foreign, *(member(i, 5) for i in (1, 2, 3))])

    assert (outcome.commit_chain, outcome.certified_in) == ("chain of 5", "q1-n")


def test_a_type_that_one_stage_lost_is_computed_through_all_stages_of_one_chain() -> None:
    plan = grid(chains={0: GRID[0]}, followers=[("d.1", 1)], lanes=2)
    held = {0: all_held(0), 1: all_held(0), 2: all_held(1)}

    step = plan_step(plan, 2, held)

    assert step.todo == {0: (2, 3)}
    assert [s.index for s in step.table[0]] == [0, 0]
    assert [s.index for s in step.table[1]] == [1, 1], "the own lane's replica goes first"


def test_a_followers_retained_types_are_used_and_nobody_computes_them_again() -> None:
    plan = grid(chains={0: GRID[0]}, followers=[("c.1", 0), ("d.1", 1)], lanes=2)
    held = {0: all_held(0), 1: all_held(1), 2: all_held(0), 3: all_held(1)}

    step = plan_step(plan, 2, held)

    assert step.todo == {0: ()}
    assert [[s.index for s in table] for table in step.table] == [[0, 1], [2, 3]]


def test_a_chain_with_a_healing_cell_computes_nothing() -> None:
    reports = [member(i, 5) for i in (0, 1, 2)] + [SettleReport(index=3, valid=False)]

    outcome = settle(grid(), 2, reports)

    assert outcome.actions == (STAY, STAY, STAY, HEAL)
    assert outcome.step.todo == {0: (0, 1, 2, 3)}


def test_if_every_chain_heals_all_of_them_compute_afterwards() -> None:
    reports = [member(0, 5), SettleReport(index=1, valid=False)]
    reports += [SettleReport(index=2, valid=False), member(3, 5)]

    outcome = settle(grid(), 2, reports)

    assert outcome.actions == (STAY, HEAL, HEAL, STAY)
    assert outcome.step.todo == {0: (0, 1), 1: (2, 3)}


def test_joiners_of_a_stage_take_turns_among_its_holders() -> None:
    chains = {r: [f"{'abcd'[r]}.1"] for r in range(4)}
    reports = [member(0, 5), member(1, 5)]
    reports += [SettleReport(index=i, valid=False) for i in (2, 3)]
    plan = make_plan(chains, quorum=2, since={"a.1": 1, "b.1": 1})

    outcome = settle(plan, 1, reports)

    assert outcome.sources == ((), (), (0, 1), (1, 0))


def test_orphans_go_to_the_least_loaded_chain_the_lowest_of_equals() -> None:
    plan = make_plan({1: ["b.1"], 2: ["c.1"]}, lanes=4, shards_per_lane=2)
    plan = replace(plan, suppliers=(0, 0, 1, 1, 2, 2, 1, 0))

    step = plan_step(plan, 2)

    assert step.todo == {1: (2, 3, 1, 6), 2: (4, 5, 0, 7)}


def test_what_was_held_before_a_roll_is_not_used_for_the_next_step() -> None:
    reports = [member(0, 6), *(member(i, 5, mark="q1-n", held=all_held(1)) for i in (1, 2, 3))]

    outcome = settle(grid(), 2, reports)

    assert outcome.step.todo == {0: (0, 1), 1: (2, 3)}


def test_a_boundary_where_nobody_held_anything_patches_nothing() -> None:
    outcome = settle(grid(), 2, [member(i, 5) for i in range(4)])

    assert "computed again" not in outcome.reason
    assert "computed again" not in outcome.reason


# Two replicas of one stage of two inner ranks: members 0 (a) and 1 (c) are inner rank 0.


def test_a_type_that_one_inner_rank_lost_is_computed_by_all_of_another_cell() -> None:
    plan = grid(chains={0: GRID[0]}, followers=[("d.1", 1)], lanes=2, ranks_per_stage=2)
    held = {0: all_held(0), 1: all_held(0), 2: all_held(1)}

    step = plan_step(plan, 2, held)

    assert step.todo == {0: (2, 3)}
    assert [[s.index for s in table] for table in step.table] == [[0, 0], [1, 1]]


def test_an_inner_rank_heals_from_its_like_in_another_cell_never_from_its_own() -> None:
    reports = [member(i, 5) for i in (0, 1, 2)] + [SettleReport(index=3, valid=False)]

    outcome = settle(grid(ranks_per_stage=2), 2, reports)

    assert outcome.actions == (STAY, STAY, STAY, HEAL)
    assert outcome.sources[3] == (2,)


def test_the_version_is_the_newest_that_every_inner_rank_reaches() -> None:
    reports = [member(0, 6), member(1, 6), member(2, 5), member(3, 5)]

    outcome = settle(grid(ranks_per_stage=2), 2, reports)

    assert outcome.version == 0, "no version has both inner ranks: the durable one is left"


# States that no vote has judged yet -------------------------------------------

THREE = {0: ["a.1"], 1: ["b.1"], 2: ["c.1"]}


def three(*states: str) -> list[SettleReport]:
    """Reports of members of one position that are at the settled version."""
    return [member(i, 5, state=state) for i, state in enumerate(states)]


def position(size: int = 3) -> Plan:
    chains = {r: [f"{'abcd'[r]}.1"] for r in range(size)}
    return make_plan(chains, quorum=2, since={f"{x}.1": 1 for x in "abcd"[:size]})


def test_a_state_that_differs_from_most_of_its_position_is_bad_before_any_vote() -> None:
    verdict = judged(position(), three("good", "bad", "good"))

    assert (verdict.state_bad, verdict.undecided) == ((1,), False)
    assert [str(slot) for slot in verdict.differing] == [str(position().members[1].slot)]


def test_two_copies_that_differ_leave_nobody_to_believe_and_no_node_is_charged() -> None:
    verdict = judged(position(2), three("good", "bad"))

    assert (verdict.state_bad, verdict.undecided, verdict.differing) == ((0, 1), True, ())


def test_what_a_returning_rank_has_is_a_copy_like_any_other() -> None:
    plan = make_plan(THREE, quorum=2, since={"a.1": 2, "b.1": 1, "c.1": 1})
    reports = three("bad", "good", "good")

    assert judged(plan, [replace(reports[0], settled=-1), *reports[1:]]).state_bad == (0,)


def test_copies_of_another_version_are_not_compared() -> None:
    reports = [*three("five", "five"), member(2, 4, state="four")]

    assert judged(position(), reports).state_bad == ()


def test_two_copies_that_differ_wait_for_the_vote_where_a_third_rolls_forward() -> None:
    rolling = member(2, 4, mark="q1-n", state="four")

    assert judged(position(), [*three("good", "bad"), rolling]).state_bad == ()


def test_a_joiner_copies_who_rolls_and_checks_it_with_the_digest_of_the_one_that_stays() -> None:
    reports = [
        member(0, 6, state="six"),
        member(1, 5, mark="q1-n", state="five"),
        SettleReport(index=2, valid=False),
    ]

    outcome = settle(position(), 1, reports)

    assert (outcome.actions, outcome.sources[2], outcome.expected[2]) == (
        (STAY, ROLL, HEAL),
        (1,),
        "six",
    )


def test_the_only_copy_of_a_state_is_believed() -> None:
    outcome = settle(
        position(2), 1, [member(0, 6, state="six"), SettleReport(index=1, valid=False)]
    )

    assert (outcome.sources[1], outcome.expected[1]) == ((0,), "six")
