"""What stores send again after others have gone: all of them together leave nothing short."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_authors import with_spare, with_stores
from tests.core.segments.keys import key_of

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.recopies import Held, Recopies, Recopy, holders_after, plan_recopies
from mainstay_core.snapshots.stores import store_addresses
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.segments import Holder, SegmentKey

GRID = with_stores(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}))
KEY = key_of(3)


def store(pod: str, before: str = "") -> Holder:
    """The store of a pod, or one that was there before its supervisor started again."""
    return Holder(pod=PodUid(pod), address=f"store-{pod}{before}")


def sent(plan: Plan, pod: str, *holders: str | Holder, peers: int = 1) -> list[tuple[str, ...]]:
    kept = [Held(KEY, tuple(store(h) if isinstance(h, str) else h for h in holders))]
    recopies = plan_recopies(plan, PodUid(pod), kept, peers=peers, domains=2)
    return [tuple(holder.pod for holder in recopy.to) for recopy in recopies]


def test_nothing_is_sent_while_as_many_hold_it_as_are_to() -> None:
    assert sent(GRID, "a", "a", "b") == []
    assert sent(GRID, "a", "a", "b", "gone") == []


def test_the_first_that_is_left_sends_to_others_and_nobody_else_does() -> None:
    assert [len(to) for to in sent(GRID, "b", "gone", "b")] == [1]
    assert sent(GRID, "d", "gone", "b", "d", peers=3) == []
    assert [len(to) for to in sent(GRID, "b", "gone", "b", "d", peers=3)] == [2]


def test_a_segment_goes_out_of_its_stage_first_and_with_few_pods_to_a_spare() -> None:
    (to,) = sent(GRID, "a", "a", "gone")
    assert to in (("b",), ("d",)), "c has the same stage"
    few = with_spare(with_stores(make_plan({0: ["a.1"], 1: ["b.1"]})), "s")
    assert sent(few, "a", "a", "gone") == [("s",)]
    assert sent(few, "s", "gone", "s") != [], "a spare sends as well"
    assert sent(few, "s", "gone", "s", "a", peers=2) == [("b",)]
    assert sent(few, "a", "gone", "s", "a", peers=2) == [("b",)], "s may not know of it"
    assert sent(few, "s", "gone", "a", "s", peers=2) == []


def test_where_a_spare_has_no_room_left_any_other_pod_takes_a_segment() -> None:
    """Six pods want three copies of each: the spare has room for five of them."""
    names = [f"{pod}.1" for pod in "abcdef"]
    plan = with_spare(with_stores(make_plan({n: [name] for n, name in enumerate(names)})), "s")
    for pod in "abcdef":
        beside = "b" if pod == "a" else "a"
        assert [len(to) for to in sent(plan, pod, pod, "gone", "s", peers=2)] == [1]
        assert [len(to) for to in sent(plan, pod, pod, "gone", beside, peers=2)] == [1]
    few = with_spare(with_stores(make_plan({n: ["a.1", "b.1"] for n in range(4)})), "s")
    assert sent(few, "a", "a", "gone", "s", peers=2) == [("b",)]
    assert sent(few, "a", "a", "gone", "b", peers=2) == [("s",)], "even if its room is used up"


def test_it_is_looked_once_for_a_plan_and_once_more_for_each_newer_window() -> None:
    older, newer = (Held(key_of(v), (store("a"), store("gone"))) for v in (3, 4))
    recopies = Recopies(PodUid("a"))
    assert recopies.due(0) is None, "there is no plan"
    assert recopies.look(0, [older]) == []

    recopies.adopt(GRID, peers=1, domains=2)
    assert recopies.due(0) is GRID
    assert [r.key for r in recopies.look(0, [older])] == [older.key]
    assert recopies.due(0) is None

    assert recopies.due(4) is GRID
    assert [r.key for r in recopies.look(4, [older, newer])] == [newer.key], "one is on its way"

    recopies.adopt(GRID, peers=1, domains=2)
    assert [r.key for r in recopies.look(4, [newer])] == [newer.key]


def test_a_store_that_started_again_in_its_pod_keeps_nothing_of_what_was_there_before() -> None:
    before = store("a", before="-before")
    few = with_stores(make_plan({0: ["a.1"], 1: ["b.1"]}))
    assert sent(few, "b", before, "b") == [("a",)]
    assert sent(few, "a", before, "b") == [], "it has nothing to send"
    (to,) = sent(GRID, "a", "a", store("b", before="-before"))
    assert len(to) == 1


def test_a_store_that_took_it_for_two_plans_counts_once() -> None:
    first = Recopy(KEY, (store("d"),), (store("b"), store("c"), store("d")))
    then = Recopy(KEY, (store("d"), store("a")), (store("b"), store("d"), store("a")))

    holders = holders_after((store("gone"), store("b"), store("c")), first, store("d"))
    assert holders == (store("b"), store("c"), store("d"))
    holders = holders_after(holders, then, store("d"))
    assert holders == (store("b"), store("d")), "the second plan has no c"
    assert holders_after(holders, then, store("a")) == (store("b"), store("d"), store("a"))


def test_of_what_nobody_said_who_keeps_it_nothing_is_sent() -> None:
    assert sent(GRID, "a") == []
    assert sent(GRID, "elsewhere", "elsewhere", "gone") == []


@pytest.mark.parametrize("seed", range(20))
def test_all_stores_together_bring_every_segment_back_to_as_many_holders_as_can_be(
    seed: int,
) -> None:
    rng = random.Random(seed)
    stages, replicas = rng.randint(1, 3), rng.randint(1, 3)
    per_stage = rng.choice((1, 1, 3, 8))
    chains = {
        r: [f"p{r * stages + p // per_stage}.{p}" for p in range(stages * per_stage)]
        for r in range(replicas)
    }
    wide = make_plan(chains, ranks_per_stage=per_stage)
    plan = with_spare(with_stores(wide), *"st"[: rng.randint(0, 2)])
    plan = replace(plan, quorum=replace(plan.quorum, id=9))
    living, peers = sorted(store_addresses(plan)), rng.randint(0, 3)
    restarted = [store(pod, before="-before") for pod in living[:2]]
    everybody = [*map(store, living), *map(store, ("gone", "away")), *restarted]
    holders: dict[SegmentKey, tuple[Holder, ...]] = {}
    for version in range(30):
        key = key_of(version, position=rng.randrange(stages * per_stage))
        holders[key] = tuple(rng.sample(everybody, rng.randint(1, min(4, len(everybody)))))
    here = [store(pod) for pod in living]
    after = {key: [h for h in told if h in here] for key, told in holders.items()}
    senders: dict[SegmentKey, list[PodUid]] = {}
    for pod in living:
        kept = [Held(key, told) for key, told in holders.items() if store(pod) in told]
        rng.shuffle(kept)
        for recopy in plan_recopies(plan, pod, kept, peers=peers, domains=2):
            senders.setdefault(recopy.key, []).append(pod)
            after[recopy.key] += [h for h in recopy.to if h not in after[recopy.key]]
            assert set(recopy.holders) == set(after[recopy.key]), "two senders choose alike"
            assert recopy.holders[0] == store(pod)

    wanted = 1 + min(peers, len(living) - 1)
    for key, told in holders.items():
        left = [h for h in told if h in here]
        assert len({h.pod for h in after[key]}) == len(after[key])
        assert len(after[key]) == len(set(after[key])) == (max(wanted, len(left)) if left else 0)
        expected = [h.pod for h in left][:1]
        expected += [h.pod for h in left if h.pod not in "st"][:1]
        due = expected if len(left) < wanted else []
        assert sorted(senders.get(key, [])) == sorted(set(due))
