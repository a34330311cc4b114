"""Copies: the best peers of each demand equal a brute force, and a loss moves little."""

from __future__ import annotations

import itertools
import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.copies import (
    Candidate,
    CopyDemand,
    CopyPlan,
    StorePod,
    choose_best,
    cost_of,
    plan_copies,
)
from mainstay_core.snapshots.units import Position


def pod(name: str, domain: str = "", *stages: int) -> StorePod:
    return StorePod(pod=PodUid(name), domain=domain, stages=stages)


def demands_of(pods: list[StorePod], size_bytes: int = 10) -> list[CopyDemand]:
    """One demand for each stage of each pod."""
    return [
        CopyDemand(position=Position(stage=stage), pod=p.pod, size_bytes=size_bytes)
        for p in pods
        for stage in p.stages
    ]


def peers_of(plan: CopyPlan, name: str, stage: int) -> tuple[str, ...]:
    (copies,) = [c for c in plan.copies if (c.pod, c.position.stage) == (name, stage)]
    return copies.peers


@pytest.mark.parametrize("seed", range(10))
def test_the_chosen_peers_are_the_best_of_all_sets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        candidates = [
            Candidate(
                adjacent=rng.random() < 0.4,
                moved=rng.random() < 0.6,
                load_bytes=rng.randint(0, 5),
                number=number,
                domain=rng.choice("abcd"[: rng.randint(1, 4)]),
                outside=rng.random() < 0.3,
            )
            for number in range(rng.randint(0, 7))
        ]
        peers = rng.randint(0, 4)
        domains = rng.randint(1, peers + 1)
        chosen = choose_best(candidates, "a", peers, domains)

        size = min(peers, len(candidates))
        assert len(chosen) == len(set(chosen)) == size
        best = min(
            cost_of(some, "a", domains)[:-1] for some in itertools.combinations(candidates, size)
        )
        assert cost_of(chosen, "a", domains)[:-1] == best


def random_pods(rng: random.Random) -> list[StorePod]:
    stages = rng.randint(1, 4)
    pods = [
        pod(f"p{number}", rng.choice(["", "rack0", "rack1", "rack2"]), rng.randrange(stages))
        for number in range(rng.randint(1, 8))
    ]
    return pods + [pod(f"s{number}", "rack9") for number in range(rng.randint(0, 2))]


@pytest.mark.parametrize("seed", range(6))
def test_domains_and_the_outside_are_reached_wherever_pods_allow_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        pods = random_pods(rng)
        peers = rng.randint(1, 3)
        domains = rng.randint(1, peers + 1)
        plan = plan_copies(pods, demands_of(pods), peers=peers, domains=domains)

        by_name = {p.pod: p for p in pods}
        for copies in plan.copies:
            stage = copies.position.stage
            others = [p for p in pods if p.pod != copies.pod]
            size = min(peers, len(others))
            assert len(copies.peers) == size
            assert copies.pod not in copies.peers
            sets = [(by_name[copies.pod], *some) for some in itertools.combinations(others, size)]
            with_outside = [some for some in sets if any(stage not in p.stages for p in some)]
            assert copies.outside == bool(with_outside)
            reachable = max(
                min(domains, len({p.failure_domain for p in some})) for some in with_outside or sets
            )
            assert min(domains, copies.num_domains) == reachable


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_is_kept_while_the_membership_stays_and_in_whatever_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        pods = random_pods(rng)
        demands = demands_of(pods)
        plan = plan_copies(pods, demands, peers=2, domains=2)
        shuffled = rng.sample(pods, len(pods)), rng.sample(demands, len(demands))

        assert plan_copies(*shuffled, peers=2, domains=2) == plan
        again = plan_copies(pods, demands, peers=2, domains=2, previous=plan)
        assert again.copies == plan.copies
        assert again.num_moved == 0


def test_a_lost_pod_moves_only_what_it_held() -> None:
    pods = [pod(f"p{r}{s}", f"rack{r % 4}", s) for r in range(8) for s in range(4)]
    plan = plan_copies(pods, demands_of(pods), peers=2, domains=2)
    left = [p for p in pods if p.pod != "p00"]

    after = plan_copies(left, demands_of(left), peers=2, domains=2, previous=plan)

    held = [c for c in plan.copies if "p00" in c.peers]
    assert after.num_moved == len(held)
    for copies in plan.copies:
        if copies.pod != "p00" and copies not in held:
            assert peers_of(after, copies.pod, copies.position.stage) == copies.peers


def test_neighbouring_stages_are_avoided_and_spares_are_used() -> None:
    pods = [pod("a", "r0", 0), pod("b", "r1", 1), pod("c", "r2", 2), pod("d", "r3", 3)]
    spares = [pod("s", "r4"), pod("t", "r5")]

    plan = plan_copies([*pods, *spares], demands_of(pods), peers=2, domains=2)

    assert {copies.pod: copies.peers for copies in plan.copies} == {
        "a": ("c", "d"),
        "b": ("s", "t"),
        "c": ("a", "s"),
        "d": ("a", "b"),
    }


def test_bytes_are_even_over_equal_pods() -> None:
    pods = [pod(f"p{r:02}{s}", f"rack{r}", s) for r in range(16) for s in range(4)]
    plan = plan_copies(pods, demands_of(pods), peers=2, domains=2)

    held = [sum(p.pod in copies.peers for copies in plan.copies) for p in pods]
    assert sum(held) == 2 * len(pods)
    assert max(held) <= 4


def choose_slowly(
    pods: list[StorePod], demands: list[CopyDemand], peers: int, domains: int, before: CopyPlan
) -> dict[CopyDemand, tuple[PodUid, ...]]:
    """Return the peers of each demand: the best of all sets of other pods, one demand at a time."""
    ordered = sorted(pods, key=lambda p: p.pod)
    kept = {
        d: next((c.peers for c in before.copies if (c.position, c.pod) == (d.position, d.pod)), ())
        for d in demands
    }
    loads = {p.pod: sum(d.size_bytes for d in demands if p.pod in kept[d]) for p in pods}
    found = {}
    for demand in sorted(demands):
        stage = demand.position.stage
        for peer in kept[demand]:
            if peer in loads:
                loads[peer] -= demand.size_bytes
        candidates = [
            Candidate(
                adjacent=bool({stage - 1, stage + 1}.intersection(p.stages)),
                moved=p.pod not in kept[demand],
                load_bytes=loads[p.pod],
                number=number,
                domain=p.failure_domain,
                outside=stage not in p.stages,
            )
            for number, p in enumerate(ordered)
            if p.pod != demand.pod
        ]
        own = next(p for p in pods if p.pod == demand.pod).failure_domain
        sets = itertools.combinations(candidates, min(peers, len(candidates)))
        best = min(sets, key=lambda some: cost_of(some, own, domains))
        found[demand] = tuple(ordered[c.number].pod for c in best)
        for peer in found[demand]:
            loads[peer] += demand.size_bytes
    return found


@pytest.mark.parametrize("seed", range(4))
def test_few_pods_are_looked_at_and_the_plan_is_that_of_all_sets(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        racks = ["", *(f"rack{n}" for n in range(rng.randint(1, 5)))]
        stages = rng.randint(1, 6)
        pods = [
            pod(f"p{n:02}", rng.choice(racks), *rng.sample(range(stages), rng.randint(0, stages)))
            for n in range(rng.randint(1, 9))
        ]
        demands = [
            CopyDemand(
                position=Position(stage=stage, inner=inner),
                pod=p.pod,
                size_bytes=rng.choice((1, 1, rng.randint(1, 9))),
            )
            for p in pods
            for stage in p.stages
            for inner in range(rng.randint(1, 2))
        ]
        peers = rng.randint(0, 3)
        domains = rng.randint(1, peers + 1)
        before = CopyPlan(copies=(), num_moved=0, reason="")
        for _ in range(2):
            plan = plan_copies(pods, demands, peers=peers, domains=domains, previous=before)
            slowly = choose_slowly(pods, demands, peers, domains, before)
            for d, copies in zip(sorted(demands), plan.copies, strict=True):
                assert (copies.position, copies.pod) == (d.position, d.pod)
                assert copies.peers == slowly[d]
            before = plan
            gone = rng.choice(pods).pod
            if len(pods) > 1:
                pods = [p for p in pods if p.pod != gone]
                demands = [d for d in demands if d.pod != gone]


def test_what_the_pods_do_not_allow_is_said() -> None:
    alone = plan_copies([pod("a", "r", 0)], demands_of([pod("a", "r", 0)]), peers=2, domains=2)

    assert alone.copies[0].holders == ("a",)
    assert alone.reason == (
        "copies of 1 share in the own pod and 2 others; 0 peers new; 1 with fewer peers, as there "
        "are no more pods; 1 with no copy outside of the stage's own pods; 1 with copies in fewer "
        "than 2 failure domains"
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"spec\.snapshots\.peers: is -1"):
        plan_copies([], [], peers=-1, domains=1)
    with pytest.raises(InvalidSpecError, match=r"spec\.protection\.domains: is 3, must be 1\.\.2"):
        plan_copies([], [], peers=1, domains=3)
    with pytest.raises(InvalidSpecError, match="pods: lists a pod twice"):
        plan_copies([pod("a"), pod("a")], [], peers=1, domains=1)
    with pytest.raises(InvalidSpecError, match="names the pod b, which has no store"):
        plan_copies([pod("a", "", 0)], demands_of([pod("b", "", 0)]), peers=1, domains=1)
    with pytest.raises(InvalidSpecError, match="lists a position of a pod twice"):
        plan_copies([pod("a")], demands_of([pod("a", "", 0)]) * 2, peers=1, domains=1)
