"""Whether the stores that a plan names are as many, and lie as far apart, as copies want."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_authors import with_spare, with_stores
from tests.core.segments.keys import JOB, record_of

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.snapshots.copies import Copies, CopyDemand, plan_copies
from mainstay_core.snapshots.stores import (
    lacks_holders,
    plan_record_line,
    store_addresses,
    store_pods,
)
from mainstay_core.snapshots.units import Position
from mainstay_core.wire.plan import Plan

ONE_STAGE = with_stores(make_plan({0: ["a.1"], 1: ["b.1"]}))
TWO_STAGES = with_stores(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}))


def test_stores_are_those_of_members_and_of_other_pods() -> None:
    plan = with_spare(TWO_STAGES, "s")

    assert store_addresses(plan) == {pod: f"store-{pod}" for pod in "abcds"}
    assert [(pod.pod, pod.stages) for pod in store_pods(plan, peers=1)] == [
        ("a", (0,)), ("b", (1,)), ("c", (0,)), ("d", (1,)), ("s", ()),
    ]  # fmt: skip


@pytest.mark.parametrize("num_spares", range(7))
def test_each_pod_without_a_member_hears_of_commits_from_one_that_has_one(num_spares: int) -> None:
    spares = "stuvwxyz"[:num_spares]
    plan = with_spare(TWO_STAGES, *spares)
    lines = {pod: plan_record_line(plan, PodUid(pod)) for pod in ("a", "b", "c", "d", *spares)}

    told = [(holder.pod, holder.address) for line in lines.values() for holder in line]
    assert sorted(told) == [(pod, f"store-{pod}") for pod in spares]
    assert all(lines[spare] == () for spare in spares)
    numbers = [len(lines[pod]) for pod in "abcd"]
    assert max(numbers) - min(numbers) <= 1


def test_a_pod_that_joins_passes_no_commit_on_while_others_are_there() -> None:
    """The quorum before commits a step more without it, when all have the planned plan."""
    before = with_spare(with_stores(make_plan({0: ["b.1"]})), "a", "s")
    after = with_spare(with_stores(make_plan({0: ["a.1"], 1: ["b.1"]}, joining=["a.1"])), "s")
    stores = {pod: SegmentIndex(JOB, 1 << 16) for pod in "abs"}

    commit(stores, before, 4, "b")
    commit(stores, after, 5, "b")
    commit(stores, after, 6, "ab")
    assert steps_at(stores["s"]) == [4, 5, 6]


def test_where_all_join_one_of_them_passes_commits_on() -> None:
    lives = ["a.1", "b.1"]
    plan = with_spare(with_stores(make_plan({0: lives[:1], 1: lives[1:]}, joining=lives)), "s")
    assert [h.pod for h in plan_record_line(plan, PodUid("a"))] == ["s"]


@pytest.mark.parametrize("num_outgoing", [1, 2])
def test_where_all_others_join_those_who_leave_pass_their_last_commits_on(
    num_outgoing: int,
) -> None:
    """Their pods are ended next, and then nobody else would know what they committed last."""
    names = "ab"[:num_outgoing]
    before = with_spare(
        with_stores(make_plan({n: [f"{p}.1"] for n, p in enumerate(names)})), *"cst"
    )
    joining = ["c.1", "d.1"]
    plan = make_plan({0: joining[:1], 1: joining[1:]}, joining=joining)
    plan = replace(plan, planned=True, outgoing=before.members)
    after = with_spare(with_stores(plan), *names, *"st")
    stores = {pod: SegmentIndex(JOB, 1 << 16) for pod in (*names, *"cdst")}

    commit(stores, before, 4, names)
    commit(stores, after, 5, names)
    commit(stores, after, 6, "cd")
    assert [steps_at(stores[pod]) for pod in "st"] == [[4, 5, 6]] * 2
    assert steps_at(stores["c"]) == [4, 5, 6], "and so does whoever makes a lost state anew there"
    assert steps_at(stores["d"]) == [5, 6]


def commit(stores: dict[str, SegmentIndex], plan: Plan, step: int, pods: str) -> None:
    """Have trainers in pods commit a step while their stores hold a plan."""
    for pod in pods:
        stores[pod].record(record_of(step))
        for holder in plan_record_line(plan, PodUid(pod)):
            stores[holder.pod].record(record_of(step), is_passed=True)


def steps_at(store: SegmentIndex) -> list[int]:
    return [record.commit.step for record in store.records]


FOUR_STAGES = with_stores(make_plan({0: ["a.1", "b.1", "c.1", "d.1"]}))


@pytest.mark.parametrize(
    ("plan", "peers", "domains", "lacks"),
    [
        (FOUR_STAGES, 0, 1, False),
        (TWO_STAGES, 1, 2, True),
        (with_spare(TWO_STAGES, "s"), 1, 2, False),
        (with_spare(TWO_STAGES, "s"), 5, 2, True),
        (ONE_STAGE, 1, 2, True),
        (with_spare(ONE_STAGE, "s"), 1, 2, False),
        (with_stores(make_plan({0: ["a.1", "b.1"]}), domains=1), 1, 2, True),
        (FOUR_STAGES, 1, 2, False),
        (FOUR_STAGES, 2, 2, True),
        (with_spare(FOUR_STAGES, "s"), 2, 2, False),
    ],
)
def test_copies_lack_holders_where_pods_domains_or_places_far_enough_are_too_few(
    plan: Plan, peers: int, domains: int, lacks: bool
) -> None:
    assert lacks_holders(plan, peers=peers, domains=domains) == lacks


def copies_of(plan: Plan, peers: int, domains: int) -> tuple[Copies, ...]:
    demands = {(m.rank.position, m.slot.pod) for m in plan.members}
    return plan_copies(
        store_pods(plan, peers=peers),
        [
            CopyDemand(position=Position(stage=s, inner=i), pod=pod, size_bytes=1)
            for (s, i), pod in demands
        ],
        peers=peers,
        domains=min(domains, peers + 1),
    ).copies


def falls_short(plan: Plan, peers: int, domains: int) -> bool:
    """Whether some copy has fewer holders or domains than it wants, or none outside its stage."""
    stages = {pod.pod: pod.stages for pod in store_pods(plan, peers=peers)}
    return any(
        len(c.peers) < peers
        or c.num_domains < min(domains, peers + 1)
        or (peers and not c.outside)
        or any(abs(stage - c.position.stage) == 1 for p in c.peers for stage in stages[p])
        for c in copies_of(plan, peers, domains)
    )


WIDE = {0: [f"a.{n}" for n in range(4)], 1: [f"b.{n}" for n in range(4)]}


@pytest.mark.parametrize("ranks_per_stage", [2, 4])
def test_a_pod_without_a_member_has_room_for_all_ranks_of_the_pods_that_it_keeps(
    ranks_per_stage: int,
) -> None:
    plan = with_spare(with_stores(make_plan(WIDE, ranks_per_stage=ranks_per_stage)), "s")

    assert {p.pod: p.room for p in store_pods(plan, peers=2)} == {"a": None, "b": None, "s": 16}
    for peers in (1, 2):
        copies = copies_of(plan, peers, 2)
        assert [len(c.peers) for c in copies] == [peers] * len(copies)
        assert all(c.outside for c in copies)


@pytest.mark.parametrize("seed", range(10))
def test_where_nothing_is_lacking_every_copy_has_what_it_wants(seed: int) -> None:
    rng, num_whole = random.Random(seed), 0
    for _ in range(40):
        stages, replicas = rng.randint(1, 6), rng.randint(1, 3)
        per_stage = rng.choice((1, 1, 2, 4))
        chains = {
            r: [f"p{r * stages + p // per_stage}.{p}" for p in range(stages * per_stage)]
            for r in range(replicas)
        }
        spares = "stu"[: rng.randint(0, 3)]
        plan = with_spare(with_stores(make_plan(chains, ranks_per_stage=per_stage)), *spares)
        peers, domains = rng.randint(0, 3), rng.randint(1, 3)
        if not lacks_holders(plan, peers=peers, domains=domains):
            num_whole += 1
            # Pods without a member have room for a few: what they cannot take lies beside.
            is_beyond = spares and replicas * stages > len(spares) * (2 + peers)
            assert is_beyond or not falls_short(plan, peers, domains)
    assert num_whole
