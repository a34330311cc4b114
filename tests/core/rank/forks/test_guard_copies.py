"""Copies of guards: which count when the owners are gone, and what becomes of one that differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.shape import Order
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.rank.events import TellVoidGuard
from mainstay_core.rank.forks.guard_copies import (
    find_guards,
    is_outnumbered,
    undecided_members,
    void_copies,
)
from mainstay_core.rank.forks.histories import boosts_of
from mainstay_core.rank.forks.makers import plan_making
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.reports import guard_finding
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.rank.state import RankState
from mainstay_core.reinitialisation.guards import plan_guards
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import BlockOutline, ForkOrder, Outline, SourceKind
from mainstay_core.wire.votes import Commit, GuardedDigest, SettleReport, Vote

STAY, LOAD, MAKE = StateAction.STAY, StateAction.LOAD, StateAction.MAKE
LAYERS = [BlockOutline(name=f"layers.{i}", kind="layer") for i in range(3)]
OUTLINE: Outline = (
    (BlockOutline(name="embedding", kind="embedding"), LAYERS[0]),
    (LAYERS[1],),
    (LAYERS[2], BlockOutline(name="head", kind="head")),
)
RULES = ForkRules(outline=OUTLINE, policy=Policy(order=Order.SWAPPED), guards=2)
LIVES = {0: ["a.1", "b.1", "c.1"], 1: ["d.1", "e.1", "f.1"]}
"""By replica; a and d are the first stage, which is lost, b and e guard it."""


def plan_of(*new: str) -> Plan:
    lives = {r: [f"{x[0]}.2" if x[0] in new else x for x in cells] for r, cells in LIVES.items()}
    every = [life for cells in lives.values() for life in cells]
    stayed = {life: 1 for life in every if life[0] not in new}
    plan = make_plan(lives, quorum=2, since=stayed, joining=[f"{n}.2" for n in new], lanes=2)
    positions = tuple(sorted({plan.position_of(m.index) for m in plan.members if m.joining}))
    return replace(plan, lineage=1, fork=ForkOrder(positions=positions, since=0))


def copy_of(end: int = 0, masters: str = "right", rest: str = "") -> GuardedDigest:
    return GuardedDigest(stage=end, masters=masters, rest=rest)


def reports(plan: Plan, **guarded: tuple[GuardedDigest, ...]) -> list[SettleReport]:
    """Of members at version 8, new ones having nothing; copies by life, as ``b``."""
    commit = Commit(step=7, norm=1, scale=1, tokens=1, loss=1, data="0" * 32)
    about: dict[str, Any] = {
        "version": 8,
        "lineage": 1,
        "settled": 1,
        "certified_in": "q1-n",
        "commit": commit,
        "chain": "before",
    }
    told = []
    for member in plan.members:
        life = str(member.incarnation)
        if life.endswith(".2"):
            told.append(SettleReport(index=member.index, valid=False, heal_address="x"))
            continue
        copies = guarded.get(life[0], ())
        state = f"stage {member.rank.stage}"
        told.append(
            SettleReport(index=member.index, valid=True, state=state, guarded=copies, **about)
        )
    return told


def settled(plan: Plan, **guarded: tuple[GuardedDigest, ...]) -> Settlement:
    return settle(plan, 1, reports(plan, **guarded), fork_rules=RULES)


def index_of(plan: Plan, life: str) -> int:
    return next(m.index for m in plan.members if str(m.incarnation)[0] == life)


def test_a_first_stage_is_made_of_its_twin_and_of_guards_who_have_the_rest() -> None:
    plan = plan_of("a", "d")
    outcome = settled(plan, b=(copy_of(),), e=(copy_of(),))

    assert outcome.version == 8
    assert outcome.actions.count(MAKE) == 2
    assert outcome.fork is not None
    (place,) = outcome.fork.made.positions
    kinds = {b.block: [(s.kind, s.stage) for s in b.sources] for b in place.blocks}
    assert kinds == {
        "embedding": [(SourceKind.GUARD, 1)],
        "layers.0": [(SourceKind.TWIN, 1)],
    }
    assert [block.is_exact for block in place.blocks] == [True, False]


def test_makers_take_guards_by_turns_and_their_copies_with_all_that_belongs_to_them() -> None:
    plan = plan_of("a", "d")
    told = reports(plan, b=(copy_of(),), e=(copy_of(),))
    outcome = settle(plan, 1, told, fork_rules=RULES)
    assert outcome.fork is not None
    guards = [index_of(plan, life) for life in "be"]
    first = []
    for life in "ad":
        holders = {1: guards}
        making = plan_making(
            plan, outcome.fork, index_of(plan, life), holders, told, outcome.guards
        )
        twin, guarded = making.beside
        assert (twin.position, twin.guarded) == (1, None)
        assert (guarded.position, guarded.guarded, guarded.expected) == (1, 0, "right")
        first.append(guarded.members[0])
    assert sorted(first) == sorted(guards)


@pytest.mark.parametrize(
    "guarded",
    [
        pytest.param({}, id="nobody guards yet"),
        pytest.param({"b": (copy_of(2),)}, id="it is another end's"),
        pytest.param({"c": (copy_of(),)}, id="it is no cell of the twin"),
        pytest.param({"b": (copy_of(),), "e": (copy_of(masters="wrong"),)}, id="they differ"),
    ],
)
def test_without_a_copy_that_counts_all_go_back(guarded: dict[str, Any]) -> None:
    outcome = settled(plan_of("a", "d"), **guarded)
    assert set(outcome.actions) == {LOAD}
    assert outcome.fork is None


def test_an_inner_stage_needs_no_guard() -> None:
    outcome = settled(plan_of("b", "e"))
    assert outcome.actions.count(MAKE) == 2


def test_the_copy_counts_that_most_guards_have() -> None:
    plan = make_plan({r: [f"{chr(97 + 3 * r + s)}.1" for s in range(3)] for r in range(3)}, lanes=3)
    twins = [m.index for m in plan.positions[1]]
    told = [
        SettleReport(index=i, valid=True, guarded=(copy_of(masters=masters),))
        for i, masters in zip(twins, ("right", "wrong", "right"), strict=True)
    ]
    (left,) = find_guards(plan, told, twins, [])
    assert (left.members, left.masters) == ((twins[0], twins[2]), "right")


def test_a_guard_that_rolls_forward_counts_where_nobody_is_there_yet() -> None:
    plan = plan_of("a", "d")
    told = reports(plan, b=(copy_of(),), e=(copy_of(masters="later"),))
    b, e = (index_of(plan, life) for life in "be")
    (left,) = find_guards(plan, told, [], [b])
    assert (left.members, left.masters) == ((b,), "")
    (left,) = find_guards(plan, told, [e], [b])
    assert (left.members, left.masters) == ((e,), "later")


@pytest.mark.parametrize(
    ("told", "counting"),
    [
        pytest.param(("right", "wrong", "right"), [0, 2], id="most have one"),
        pytest.param(("right", "wrong"), None, id="no majority"),
    ],
)
def test_guards_that_roll_forward_are_compared_before_the_step(
    told: tuple[str, ...], counting: list[int] | None
) -> None:
    """They apply the same gradient, so copies that differ before it differ after it."""
    n = len(told)
    plan = make_plan({r: [f"{chr(97 + 3 * r + s)}.1" for s in range(3)] for r in range(n)}, lanes=n)
    twins = [m.index for m in plan.positions[1]]
    copies = [
        SettleReport(index=i, valid=True, guarded=(copy_of(masters=masters),))
        for i, masters in zip(twins, told, strict=True)
    ]
    found = find_guards(plan, copies, [], twins)
    if counting is None:
        assert found == ()
    else:
        (left,) = found
        assert (left.members, left.masters) == (tuple(twins[i] for i in counting), "")


def test_a_copy_that_differs_from_what_the_owners_have_is_void() -> None:
    plan = make_plan(LIVES, lanes=2)
    guards = plan_guards(plan, OUTLINE, 2)
    b, e = (index_of(plan, life) for life in "be")

    def votes(**told: GuardedDigest) -> list[Vote]:
        about: dict[str, Any] = {"step": 8, "attempt": 0, "ok": True, "norms_sq": (), "stats": ()}
        about |= {"gradient": "", "state": "", "newest_plan": 1, "newest_nonce": "n"}
        lives = [str(m.incarnation)[0] for m in plan.members]
        copies = ((told[life],) if life in told else () for life in lives)
        return [Vote(guarded=copy, **about) for copy in copies]

    own = {"a": copy_of(), "d": copy_of()}
    cast = votes(**own, b=copy_of(), e=copy_of(rest="other"))
    assert void_copies(plan, guards, cast, b) == ()
    assert void_copies(plan, guards, cast, e) == (0,)
    assert void_copies(plan, guards, votes(**own), b) == (), "it has none to be void"


def vote_of(*told: GuardedDigest) -> Vote:
    about: dict[str, Any] = {"step": 8, "attempt": 0, "ok": True, "norms_sq": (), "stats": ()}
    about |= {"gradient": "", "state": "", "newest_plan": 1, "newest_nonce": "n"}
    return Vote(guarded=told, **about)


@pytest.mark.parametrize(
    ("replicas", "told", "unsure"),
    [
        pytest.param(1, "ox", "ab", id="one guard against one owner: nobody knows"),
        pytest.param(1, "oo", "", id="they agree"),
        pytest.param(1, "o ", "", id="the guard has none yet"),
        pytest.param(2, "oxox", "adbe", id="two guards that agree against two owners"),
        pytest.param(2, "ooox", "", id="a guard agrees with the owners against the other"),
        pytest.param(2, "oxo ", "", id="two owners against one guard"),
    ],
)
def test_of_a_guard_and_an_owner_that_differ_neither_is_believed_alone(
    replicas: int, told: str, unsure: str
) -> None:
    """``told`` has what owner and guard of each replica tell of the first stage."""
    plan = make_plan({r: LIVES[r] for r in range(replicas)}, lanes=replicas)
    guards = plan_guards(plan, OUTLINE, 2)
    votes = [vote_of()] * len(plan.members)
    for replica in range(replicas):
        for place, life in enumerate(("ad"[replica], "be"[replica])):
            what = told[2 * replica + place]
            if what != " ":
                votes[index_of(plan, life)] = vote_of(copy_of(masters=what))
    found = undecided_members(plan, guards, votes, 0)
    assert found == {index_of(plan, life) for life in unsure}


@pytest.mark.parametrize(
    ("told", "outnumbered"),
    [("oxx", True), ("oxy", False), ("oox", False), ("ox ", False), ("xxx", False)],
)
def test_more_guards_that_agree_than_owners_are_told_of(told: str, outnumbered: bool) -> None:
    """The other cell of the first stage is lost: a is its only owner, b and e guard it."""
    plan = make_plan(LIVES, lanes=2)
    (lost,) = (m for m in plan.members if str(m.incarnation) == "d.1")
    members = tuple(
        replace(m, index=i) for i, m in enumerate(m for m in plan.members if m is not lost)
    )
    plan = replace(plan, members=members)
    guards = plan_guards(plan, OUTLINE, 2)
    assert {guard.index for guard in guards if guard.end == 0} == {
        index_of(plan, life) for life in "be"
    }
    votes = [vote_of()] * len(plan.members)
    for life, what in zip("abe", told, strict=True):
        if what != " ":
            votes[index_of(plan, life)] = vote_of(copy_of(masters=what))
    assert is_outnumbered(plan, guards, votes, 0) == outnumbered
    if outnumbered:
        assert undecided_members(plan, guards, votes, 0) == {index_of(plan, x) for x in "abe"}


@pytest.mark.parametrize(("life", "words"), [("a", "guards keep of it"), ("b", "it guards of")])
def test_both_are_named_where_nobody_knows_who_is_wrong(life: str, words: str) -> None:
    plan = make_plan({0: LIVES[0]}, lanes=1)
    index = index_of(plan, life)
    other = plan.members[index_of(plan, "b" if life == "a" else "a")].slot
    state = RankState(
        slot=plan.members[index].slot,
        incarnation=plan.members[index].incarnation,
        num_steps=9,
        shards_per_lane=1,
        clip_norm=None,
        heal_address="x",
        plan=plan,
        index=index,
    )
    unsure = guard_finding(state, TellVoidGuard(8, 0, (other,)))
    assert words in unsure.reason
    assert f"nobody knows which is wrong, it or {other}" in unsure.reason
    assert unsure.verdict is Verdict.WIRE, "no device is accused"
    assert "owners" not in unsure.reason.partition(";")[2]
    many = guard_finding(state, TellVoidGuard(8, 0, (other,), outnumbered=True))
    whose = "this is the owner" if life == "a" else "rather the owner, in stage 0"
    assert many.reason.endswith(f"more guards agree than there are owners: {whose}")
    assert many.verdict is Verdict.WIRE
    sure = guard_finding(state, TellVoidGuard(8, 0))
    assert (sure.verdict, "nobody knows" in sure.reason) == (Verdict.TRANSIENT, False)


@pytest.mark.parametrize("repeats", [False, True])
def test_what_was_made_with_guards_is_not_made_once_more_when_they_are_gone(repeats: bool) -> None:
    """A young checkpoint is no help: the fork that all have noted names the guards."""
    plan = plan_of("a", "d")
    rules = replace(RULES, policy=replace(RULES.policy, stale_steps=5), after_lost_steps=0)
    told = reports(plan, b=(copy_of(),), e=(copy_of(),))
    first = settle(plan, 1, [replace(r, durable=6) for r in told], fork_rules=rules)
    assert first.fork is not None
    if repeats:
        plan = replace(plan, fork=ForkOrder(positions=(0,), since=0, repeats=first.fork))
    noted = {"history": first.history, "chain": first.commit_chain}
    for guards, action in (({}, LOAD), ({"b": (copy_of(),)}, MAKE)):
        told = [replace(r, durable=6, **noted if r.valid else {}) for r in reports(plan, **guards)]
        outcome = settle(plan, 1, told, fork_rules=rules)
        assert action in outcome.actions
        assert outcome.fork == (first.fork if action is MAKE else None)


@pytest.mark.parametrize("behind", [False, True])
def test_a_fork_that_is_made_again_takes_what_its_owners_have_if_nobody_guards(
    behind: bool,
) -> None:
    """Nobody was lost. A new guard would copy in a step, and the fork is due before that."""
    first = settled(plan_of("a", "d"), b=(copy_of(),), e=(copy_of(),)).fork
    assert first is not None
    plan = plan_of()
    order = ForkOrder(positions=(0,), since=0, repeats=first)
    plan = replace(plan, fork=order)
    told = reports(plan)
    if behind:
        late = index_of(plan, "d")
        told = [replace(r, version=7, mark="q1-n") if r.index == late else r for r in told]
    outcome = settle(plan, 1, told, fork_rules=RULES)

    assert (outcome.fork is None) == behind
    assert outcome.actions.count(MAKE) == (0 if behind else 2)
    if not behind:
        owner = index_of(plan, "a")
        twins = {1: [index_of(plan, life) for life in "be"]}
        making = plan_making(plan, first, owner, twins, told, outcome.guards)
        assert making.keeps_own
        assert [beside.guarded for beside in making.beside] == [None]


def test_what_a_guard_had_keeps_its_learning_rate() -> None:
    outcome = settled(plan_of("a", "d"), b=(copy_of(),), e=(copy_of(),))
    assert boosts_of(outcome.history, 9, 0) == {"layers.0": 1.1}
