"""Who copies which units and who holds them, by the plan alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.authors import authorship
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.wire.plan import OtherStore, Plan, Rendezvous


def prices(*sizes: int) -> tuple[UnitPrice, ...]:
    return tuple(
        UnitPrice(name=f"block{n}", full_bytes=size, compute_bytes=0)
        for n, size in enumerate(sizes)
    )


def with_stores(plan: Plan, without: str = "", domains: int = 0) -> Plan:
    pods = sorted({m.slot.pod for m in plan.members})
    hosts = tuple(
        Rendezvous(
            pod=PodUid(pod),
            gather=f"gather-{pod}",
            snapshots="" if pod == without else f"store-{pod}",
            domain=f"rack{n % domains}" if domains else pod,
        )
        for n, pod in enumerate(pods)
    )
    return replace(plan, hosts=hosts)


GRID = with_stores(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}))


def test_each_unit_of_a_position_has_one_author_and_the_bytes_are_divided() -> None:
    order = prices(8, 4, 2, 2)
    first, second = (authorship(GRID, i, order, peers=1, domains=2) for i in (0, 1))

    assert {u.name for u in (*first.units, *second.units)} == {u.name for u in order}
    assert {u.name for u in first.units}.isdisjoint(u.name for u in second.units)
    assert sum(u.full_bytes for u in first.units) == sum(u.full_bytes for u in second.units)


def test_holders_are_other_pods_with_stores_at_their_addresses() -> None:
    own = authorship(GRID, 0, prices(1, 1), peers=2, domains=3)

    assert len(own.holders) == 2
    assert all(h.pod != "a" and h.address == f"store-{h.pod}" for h in own.holders)


def test_who_has_no_store_in_its_pod_or_no_peer_names_no_holder() -> None:
    alone = with_stores(make_plan({0: ["a.1"]}))
    without = with_stores(make_plan({0: ["a.1", "b.1"]}), without="a")

    assert authorship(alone, 0, prices(1), peers=2, domains=2).holders == ()
    assert authorship(without, 0, prices(1), peers=2, domains=2).holders == ()
    assert authorship(without, 1, prices(1), peers=2, domains=2).holders == ()


def random_plan(rng: random.Random) -> Plan:
    stages, replicas = rng.randint(1, 3), rng.randint(1, 4)
    names = [f"p{n}.1" for n in range(stages * replicas)]
    rng.shuffle(names)
    chains = {r: names[r * stages : (r + 1) * stages] for r in range(replicas)}
    return with_stores(make_plan(chains), domains=rng.choice((0, 2, 3)))


@pytest.mark.parametrize("seed", range(20))
def test_every_unit_is_copied_once_to_as_many_pods_as_there_are(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        plan = random_plan(rng)
        order = prices(*(rng.randint(1, 9) for _ in range(rng.randint(1, 6))))
        peers = rng.randint(0, 3)
        for members in plan.positions:
            own = [authorship(plan, m.index, order, peers=peers, domains=2) for m in members]
            copied = [u.name for one in own for u in one.units]
            assert sorted(copied) == sorted(u.name for u in order)
            for member, one in zip(members, own, strict=True):
                pods = [h.pod for h in one.holders]
                assert member.slot.pod not in pods
                assert len(pods) == len(set(pods)) == min(peers, len(plan.members) - 1)
                again = authorship(plan, member.index, order, peers=peers, domains=2)
                assert again == one


def test_a_pod_that_a_stage_fills_alone_is_not_the_only_one_with_its_copies() -> None:
    # Stage 0 is on a and c: a copy on the other of the two is lost with the stage.
    for index, own in ((0, "a"), (1, "c")):
        holders = authorship(GRID, index, prices(1), peers=1, domains=2).holders
        assert {h.pod for h in holders} <= {"b", "d"}, f"{own} keeps its copy in its own stage"


def with_spare(plan: Plan, *names: str) -> Plan:
    others = tuple(OtherStore(pod=PodUid(n), address=f"store-{n}", domain=n) for n in names)
    return replace(plan, other_stores=others)


def test_a_spare_holds_the_copies_that_would_else_lie_in_the_stage_or_beside_it() -> None:
    alone = with_spare(with_stores(make_plan({0: ["a.1"], 1: ["b.1"]})), "s")
    chain = with_spare(with_stores(make_plan({0: ["a.1", "b.1", "c.1"]})), "s")

    # One stage has members in both pods: only the spare outlives the stage.
    for index in (0, 1):
        own = authorship(alone, index, prices(1), peers=1, domains=2)
        assert [(h.pod, h.address) for h in own.holders] == [("s", "store-s")]
    # Of a chain's middle stage each other pod is a neighbour.
    middle = authorship(chain, 1, prices(1), peers=1, domains=2)
    assert [h.pod for h in middle.holders] == ["s"]
