"""Whether the stores that a plan names are as many, and lie as far apart, as copies want."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.test_authors import with_spare, with_stores

from mainstay_core.snapshots.copies import CopyDemand, plan_copies
from mainstay_core.snapshots.stores import lacks_holders, store_addresses, store_pods
from mainstay_core.snapshots.units import Position
from mainstay_core.wire.plan import OtherStore, Plan

ONE_STAGE = with_stores(make_plan({0: ["a.1"], 1: ["b.1"]}))
TWO_STAGES = with_stores(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}))


def test_stores_are_those_of_members_and_of_other_pods() -> None:
    plan = with_spare(TWO_STAGES, "s")

    assert store_addresses(plan) == {pod: f"store-{pod}" for pod in "abcds"}
    assert [(pod.pod, pod.stages) for pod in store_pods(plan)] == [
        ("a", (0,)), ("b", (1,)), ("c", (0,)), ("d", (1,)), ("s", ()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "peers", "domains", "lacks"),
    [
        (TWO_STAGES, 1, 2, False),
        (TWO_STAGES, 4, 2, True),
        (with_spare(TWO_STAGES, "s"), 4, 2, False),
        (ONE_STAGE, 1, 2, True),
        (with_spare(ONE_STAGE, "s"), 1, 2, False),
        (ONE_STAGE, 0, 1, False),
        (with_stores(make_plan({0: ["a.1", "b.1"]}), domains=1), 1, 2, True),
    ],
)
def test_copies_lack_holders_where_pods_domains_or_an_outside_are_too_few(
    plan: Plan, peers: int, domains: int, lacks: bool
) -> None:
    assert lacks_holders(plan, peers=peers, domains=domains) == lacks


def falls_short(plan: Plan, peers: int, domains: int) -> bool:
    """Whether some copy has fewer holders or domains than it wants, or none outside its stage."""
    demands = {(m.rank.position, m.slot.pod) for m in plan.members}
    copies = plan_copies(
        store_pods(plan),
        [
            CopyDemand(position=Position(stage=s, inner=i), pod=pod, size_bytes=1)
            for (s, i), pod in demands
        ],
        peers=peers,
        domains=min(domains, peers + 1),
    )
    return any(
        len(c.peers) < peers or c.num_domains < min(domains, peers + 1) or (peers and not c.outside)
        for c in copies.copies
    )


@pytest.mark.parametrize("seed", range(10))
def test_where_nothing_is_lacking_every_copy_has_what_it_wants(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        stages, replicas = rng.randint(1, 3), rng.randint(1, 3)
        names = [f"p{n}.1" for n in range(stages * replicas)]
        chains = {r: names[r * stages : (r + 1) * stages] for r in range(replicas)}
        plan = with_spare(with_stores(make_plan(chains)), *"st"[: rng.randint(0, 2)])
        racks = [
            OtherStore(pod=o.pod, address=o.address, domain=rng.choice(("p0", "far")))
            for o in plan.other_stores
        ]
        plan = replace(plan, other_stores=tuple(racks))
        peers, domains = rng.randint(0, 3), rng.randint(1, 3)
        # Both rules in one: with one peer it may have to choose between them.
        if peers != 1:
            wants = falls_short(plan, peers, domains)
            assert lacks_holders(plan, peers=peers, domains=domains) == wants
