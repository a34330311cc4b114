"""Which groups the members of a position keep, over plans that come and go."""

from __future__ import annotations

import random
import threading

import pytest
from tests.core.plans import life_of, make_plan

from mainstay_core.gather.client import QuorumAborted
from mainstay_core.rank.connections import GroupEnded, QuorumConnections
from mainstay_core.rank.settle import settle
from mainstay_core.wire.votes import SettleReport


class Gather:
    def __init__(self):
        self.ended = None

    def leave(self):
        self.ended = self.ended or QuorumAborted("left")

    def abort(self, why):
        self.ended = self.ended or QuorumAborted(why)


class Group:
    def __init__(self, name, rank, size):
        self.name, self.rank, self.size = name, rank, size
        self.met, self.ended = False, None

    @property
    def connected(self):
        return self.met and self.ended is None

    def shutdown(self, why):
        self.ended = self.ended or why


class Connections(QuorumConnections):
    def __init__(self):
        super().__init__(threading.Condition(threading.RLock()))

    def _join(self, *_):
        return Gather()

    def _group(self, name, rank, size):
        return Group(name, rank, size)

    def _chain_groups(self, name, _plan, chain):
        return Group(name, chain.cells.index(self.index), len(chain.cells))


class Crew:
    """All trainers of a job. They adopt plans together, and reduce under each."""

    def __init__(self):
        self.lives = {}
        self._number = 0

    def adopt(self, chains, *, planned=True, lost=(), **options):
        """Adopt a plan and begin to reduce; return the positions that had to connect a group.

        Args:
            chains: as of ``make_plan``, as are the options.
            planned: whether the plan interrupts nobody.
            lost: lives that lose their group before they report.
        """
        self._number += 1
        plan = make_plan(
            chains,
            quorum=self._number,
            planned=planned,
            unplanned=0 if planned else self._number,
            since=dict.fromkeys(self.lives, 0),
            **options,
        )
        members = {life_of(m): m for m in plan.members}
        for life in self.lives.keys() - members.keys():
            self.lives.pop(life).leave()
        reports = [self._enter(life, m, plan, life in lost) for life, m in members.items()]
        agreed = settle(plan, 1, reports).stage_groups
        connected = set()
        for life, member in members.items():
            position = plan.position_of(member.index)
            standing = self.lives[life].standing_stage_group(agreed[position])
            group, is_new = self.lives[life].begin_stage_group(agreed[position])
            assert standing is (None if is_new else group)
            if is_new:
                assert self.lives[life].standing_stage_group(agreed[position]) is None
                group.met = True
                connected.add(position)
        for position in plan.positions:
            self._check(position)
            for member in position:
                mine = self.lives[life_of(member)]
                name = agreed[plan.position_of(member.index)]
                assert mine.standing_stage_group(name) is mine._stage_group
        return connected

    def _enter(self, life, member, plan, loses):
        valid, mine = life in self.lives, self.lives.setdefault(life, Connections())
        mine.see(plan)
        mine.adopt(plan, member.index)
        if loses and mine._stage_group is not None:
            mine._stage_group.shutdown("lost")
        name, version = mine.stage_group_name, 3 if valid else 0
        settled = self._number - 1 if valid else -1
        return SettleReport(
            index=member.index,
            valid=valid,
            version=version,
            settled=settled,
            stage_group=name,
        )

    def _check(self, members):
        """All members of a position are in one group, each at its own place, and nobody else."""
        groups = [self.lives[life_of(m)]._stage_group for m in members]
        if len(members) == 1:
            assert groups == [None]
            return
        assert len({group.name for group in groups}) == 1
        assert {group.size for group in groups} == {len(members)}
        assert all(group.connected for group in groups)
        by_rank = sorted(zip(groups, members, strict=True), key=lambda pair: pair[0].rank)
        assert [group.rank for group, _ in by_rank] == list(range(len(members)))
        order = [member.index for _, member in by_rank]
        for member in members:
            assert self.lives[life_of(member)].stage_order() == order


TWO = {0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}


@pytest.fixture
def crew():
    crew = Crew()
    assert crew.adopt(TWO, planned=False) == {0, 1}
    return crew


def test_a_chain_of_which_a_replay_has_connected_the_cell_is_connected_when_it_computes():
    mine, plan = Connections(), make_plan({0: ["a.1", "b.1"]}, ranks_per_stage=2)
    mine.see(plan)
    mine.adopt(plan, 0)
    groups, is_new = mine.begin_pipeline("")
    assert is_new
    assert mine.begin_pipeline("") == (groups, True), "its cell alone has met"
    groups.met = True
    assert mine.begin_pipeline("") == (groups, False)


def test_a_planned_plan_connects_no_position_whose_members_stay(crew):
    assert crew.adopt(TWO) == set()
    joined = crew.adopt(TWO, followers=[("e.1", 1)], joining=["e.1"])
    assert joined == {1}, "a hand-over: the successor joins"
    handed_over = crew.adopt({**TWO, 1: ["c.1", "e.1"]})
    assert handed_over == {1}, "and takes the place of the one that leaves"
    assert crew.adopt({0: ["c.1", "b.1"], 1: ["a.1", "e.1"]}) == set(), "chained otherwise"
    grown = {0: ["c.1", "b.1"], 1: ["a.1", "e.1"], 2: ["f.1", "g.1"]}
    assert crew.adopt(grown, joining=["f.1", "g.1"]) == {0, 1}, "scaled: all positions gain one"
    assert crew.adopt(grown) == set()
    assert crew.adopt({0: ["c.1", "b.1"]}) == set(), "scaled: one member needs no group"


def test_a_group_of_a_quorum_that_failed_is_never_kept(crew):
    first = crew.lives["a.1"]._stage_group
    assert crew.adopt(TWO, planned=False) == {0, 1}
    assert first.ended
    crew.lives["c.1"].fail_quorum("an operation failed")
    assert crew.adopt(TWO) == {0}
    crew.lives["c.1"].gather().abort("noticed by another thread that has not told yet")
    assert crew.adopt(TWO) == {0}


def test_if_one_member_has_lost_the_group_all_connect_a_new_one(crew):
    kept = {life: mine._stage_group for life, mine in crew.lives.items()}
    assert crew.adopt(TWO, lost=["c.1"]) == {0}
    assert kept["a.1"].ended == "a member of the position has lost the stage group"
    assert crew.lives["b.1"]._stage_group is kept["b.1"]


def test_another_life_on_the_same_slot_is_another_member(crew):
    assert crew.adopt({**TWO, 1: ["c.2", "d.1"]}) == {0}


def test_what_is_told_late_of_a_quorum_that_was_left_ends_no_group_of_the_next(crew):
    mine = crew.lives["a.1"]
    left = mine.adopted.quorum
    crew.adopt(TWO)
    mine.lost_quorum(left, "the host has gone")
    assert mine.stage_group_name
    mine.lost_quorum(mine.adopted.quorum, "the host has gone")
    assert not mine.stage_group_name
    assert mine.standing_stage_group("") is None


def test_a_group_that_ends_after_the_settle_ends_the_quorum(crew):
    mine = crew.lives["a.1"]
    agreed = mine.stage_group_name
    mine.adopt(mine.adopted, mine.index)
    mine._stage_group = None
    with pytest.raises(GroupEnded, match="has ended since the quorum settled"):
        mine.begin_stage_group(agreed)


@pytest.mark.parametrize("seed", range(150))
def test_groups_of_drawn_plans_are_kept_exactly_where_all_members_had_them(seed):
    rng, crew = random.Random(seed), Crew()
    held: list[frozenset[str]] = []
    lives, pods = dict.fromkeys("abcdefgh", 1), list("abcdefgh")
    cut = 2
    for _ in range(12):
        planned = bool(crew.lives) and rng.random() < 0.8
        for pod in pods:
            lives[pod] += rng.random() < 0.05
        if rng.random() < 0.4:
            rng.shuffle(pods)
            cut = rng.randint(1, 3)
        cells = [
            [f"{pod}.{lives[pod]}" for pod in part] for part in (pods[:cut], pods[cut : 2 * cut])
        ]
        for part in cells:  # the chains are mated otherwise
            rng.shuffle(part)
        chains = {r: [cells[0][r], cells[1][r]] for r in range(len(cells[0]))}
        lost = [life for part in cells for life in part if rng.random() < 0.05]
        found = crew.adopt(chains, planned=planned, lost=lost)
        for position in range(2):
            members = frozenset(cells[position])
            keeps = planned and members in held and not members & set(lost)
            connects = len(members) > 1 and not keeps
            assert (position in found) == connects, f"position {position} of {sorted(members)}"
        held = [*map(frozenset, cells)]
