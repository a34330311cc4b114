"""What stores send again after others have gone: all of them together leave nothing short."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_authors import with_spare, with_stores
from tests.core.segments.keys import key_of

from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.recopies import Held, Recopies, Recopy, plan_recopies
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
    other = Held(key_of(4, unit=1), newer.holders)
    assert [r.key for r in recopies.look(4, [newer, other])] == [other.key], "one still is"


def few_stores() -> Plan:
    """Four pods of a stage each, which want one more copy of everything."""
    names = {n: [f"{pod}.1"] for n, pod in enumerate("abcd")}
    return with_stores(make_plan(names))


def adopted(pod: str = "a", plan: Plan | None = None, peers: int = 1) -> Recopies:
    recopies = Recopies(PodUid(pod))
    recopies.adopt(plan or few_stores(), peers=peers, domains=2)
    assert recopies.look(0, []) == []
    return recopies


def look(recopies: Recopies, *kept: Held, from_version: int = 0) -> list[Recopy]:
    """Look as a store does, which looks only at what is wanted."""
    if recopies.due(from_version) is None:
        return []
    wanted = recopies.wanted(from_version)
    return recopies.look(from_version, [h for h in kept if wanted is None or h.key in wanted])


def test_what_is_written_with_a_holder_that_the_plan_does_not_name_is_sent_again_as_it_comes() -> (
    None
):
    """A quorum goes on while the plan that follows is held already."""
    recopies, whole, short = adopted(), Held(key_of(3), ()), Held(key_of(4, kind="gradient"), ())
    whole = whole._replace(holders=(store("a"), store("b")))
    short = short._replace(holders=(store("a"), store("away")))
    recopies.came(whole)
    assert recopies.due(0) is None
    recopies.came(short)
    assert [r.key for r in look(recopies, whole, short)] == [short.key]
    assert recopies.due(0) is None

    again = short._replace(holders=(store("a"), store("b", before="-before")))
    recopies.came(again)
    assert [r.key for r in look(recopies, whole, again)] == [short.key], "it was written again"


def test_what_is_written_by_one_who_knew_no_other_store_is_sent_to_the_one_that_has_come() -> None:
    alone = with_stores(make_plan({0: ["a.1"]}))
    recopies, written = adopted(plan=alone), Held(key_of(3, kind="gradient"), (store("a"),))
    recopies.came(written)
    assert recopies.due(0) is None, "no other store is there"

    recopies.adopt(with_spare(alone, "s"), peers=1, domains=2)
    assert [r.to for r in look(recopies, written)] == [(store("s"),)]
    later = Held(key_of(4, kind="gradient"), (store("a"),))
    recopies.came(later)
    assert [(r.key, r.to) for r in look(recopies, written, later)] == [(later.key, (store("s"),))]
    recopies.came(Held(key_of(5, kind="gradient"), (store("a"), store("s"))))
    assert recopies.due(0) is None


def test_a_state_of_a_window_in_flight_waits_until_that_is_complete() -> None:
    recopies, state = adopted(), Held(key_of(3), (store("a"), store("away")))
    recopies.came(state)
    assert look(recopies) == [], "no replay needs it yet"
    assert [r.key for r in look(recopies, state, from_version=3)] == [state.key]


def test_a_store_that_takes_nothing_is_passed_over_for_the_next() -> None:
    recopies, state = adopted(), Held(key_of(3), (store("a"), store("away")))
    recopies.came(state)
    asked = []
    while found := look(recopies, state):
        (recopy,) = found
        (to,) = recopy.to
        asked.append(to.pod)
        recopies.answered(recopy, to, is_kept=False)
    assert sorted(asked) == ["b", "c", "d"]
    assert recopies.is_waiting


def test_stores_that_took_nothing_are_asked_again_after_one_step_two_and_four() -> None:
    """Room comes with a step, and with the next window: not all hear of that at once."""
    recopies, state = adopted(), Held(key_of(3), (store("a"), store("away")))
    recopies.came(state)
    asked_at = list[int]()
    for step in range(3, 20):
        recopies.came(Held(key_of(step, kind="gradient"), (store("a"), store("b"))))
        num_asked = 0
        while found := look(recopies, state):
            (recopy,) = found
            num_asked += 1
            recopies.answered(recopy, recopy.to[0], is_kept=False)
        assert num_asked in (0, 3), "each of them, or none"
        asked_at += [step] * bool(num_asked)
    assert asked_at == [3, 4, 6, 10, 18]
    (recopy,) = look(recopies, state, from_version=3)
    recopies.answered(recopy, recopy.to[0], is_kept=True)
    assert not recopies.is_waiting


def test_of_many_that_find_no_room_one_is_tried_and_the_rest_follow_it() -> None:
    recopies = adopted()
    states = [Held(key_of(version), (store("a"), store("away"))) for version in range(3, 9)]
    for state in states:
        recopies.came(state)
    first = look(recopies, *states)
    assert len(first) == 6
    for recopy in first:
        recopies.answered(recopy, recopy.to[0], is_kept=False)
    (tried,) = look(recopies, *states)
    assert tried.to != first[0].to
    recopies.answered(tried, tried.to[0], is_kept=True)
    rest = look(recopies, *(s for s in states if s.key != tried.key))
    assert [r.to for r in rest] == [tried.to] * 5
    for recopy in rest:
        recopies.answered(recopy, recopy.to[0], is_kept=True)
    assert not recopies.is_waiting
    assert look(recopies, *states) == []


def test_what_is_dropped_while_it_is_tried_leaves_the_others_their_turn() -> None:
    recopies = adopted()
    states = [Held(key_of(version), (store("a"), store("away"))) for version in (3, 4)]
    for state in states:
        recopies.came(state)
    for recopy in look(recopies, *states):
        recopies.answered(recopy, recopy.to[0], is_kept=False)
    assert look(recopies, states[1]) == [], "the first has gone meanwhile"
    assert [r.key for r in look(recopies, states[1])] == [states[1].key]


def test_answers_of_another_plan_or_to_another_copy_change_nothing() -> None:
    recopies, state = adopted(), Held(key_of(3), (store("a"), store("away")))
    recopies.came(state)
    (before,) = look(recopies, state)
    recopies.came(state)
    (again,) = look(recopies, state)
    recopies.answered(before, before.to[0], is_kept=False)
    assert recopies.due(0) is None
    assert not recopies.is_waiting
    to = again.to[0].pod
    without = replace(few_stores(), hosts=tuple(h for h in few_stores().hosts if h.pod != to))
    recopies.adopt(without, peers=1, domains=2)
    recopies.answered(again, again.to[0], is_kept=False)
    assert not recopies.is_waiting


def test_what_is_on_its_way_to_a_store_that_the_newer_plan_names_is_not_sent_again() -> None:
    recopies = adopted(peers=2)
    state = Held(key_of(3), (store("a"), store("away"), store("gone")))
    recopies.came(state)
    (first,) = look(recopies, state)
    assert len(first.to) == 2

    with_one_more = with_spare(few_stores(), "s")
    recopies.adopt(with_one_more, peers=2, domains=2)
    assert look(recopies, state) == [], "both are on their way"
    recopies.adopt(with_one_more, peers=3, domains=2)
    (second,) = look(recopies, state)
    assert len(second.to) == 1
    assert {*second.holders} == {store("a"), *first.to, *second.to}

    # Whoever of them takes it, one that did not is made good elsewhere.
    recopies.answered(second, second.to[0], is_kept=True)
    recopies.answered(first, first.to[0], is_kept=False)
    recopies.answered(first, first.to[1], is_kept=True)
    holders = state.holders
    for holder in (second.to[0], first.to[1]):
        holders = recopies.holders_after(holders, holder)
    assert holders == (store("a"), second.to[0], first.to[1])
    (third,) = look(recopies, state._replace(holders=holders))
    assert {*third.to}.isdisjoint({*first.to, *second.to})
    recopies.answered(third, third.to[0], is_kept=True)
    assert not recopies.is_waiting


def test_what_is_on_its_way_to_a_store_that_the_newer_plan_lacks_goes_to_another() -> None:
    recopies, state = adopted(), Held(key_of(3), (store("a"), store("away")))
    recopies.came(state)
    (first,) = look(recopies, state)
    to = first.to[0].pod
    without = replace(few_stores(), hosts=tuple(h for h in few_stores().hosts if h.pod != to))

    recopies.adopt(without, peers=1, domains=2)

    (second,) = look(recopies, state)
    assert to not in {holder.pod for holder in second.holders}


@pytest.mark.parametrize("seed", range(30))
def test_every_segment_has_its_holders_as_soon_as_stores_with_room_are_there(seed: int) -> None:
    """Whatever comes when, under whichever plan: once some have room, nothing is left short."""
    rng = random.Random(seed)
    names = "abcdefg"[: rng.randint(3, 7)]
    every, peers = make_plan({n: [f"{pod}.1"] for n, pod in enumerate(names)}), rng.randint(1, 2)
    plan = with_stores(every)
    recopies = Recopies(PodUid("a"))
    recopies.adopt(plan, peers=peers, domains=2)
    full = {store(pod) for pod in names[1:] if rng.random() < 0.6}
    kept: dict[SegmentKey, Held] = {}
    on_their_way: list[tuple[Recopy, Holder]] = []
    from_version, wanted = 0, 1 + min(peers, len(names) - 1)

    def is_short(held: Held) -> bool:
        return len({h for h in held.holders if h.pod in names}) < wanted

    def go_on() -> None:
        """Look, and have some stores answer, in any order."""
        found = look(recopies, *kept.values(), from_version=from_version)
        on_their_way.extend((recopy, to) for recopy in found for to in recopy.to)
        rng.shuffle(on_their_way)
        for recopy, to in [on_their_way.pop() for _ in range(rng.randint(0, len(on_their_way)))]:
            is_kept = to not in full
            if is_kept and recopy.key in kept:
                held = kept[recopy.key]
                holders = recopies.holders_after(held.holders, to)
                kept[recopy.key] = held._replace(holders=holders)
            recopies.answered(recopy, to, is_kept=is_kept)

    for version in range(1, 16):
        for unit in range(rng.randint(1, 3)):
            others = [store(pod) for pod in names[1:] if store(pod) not in full]
            others += [store("gone"), store("away")]
            holders = (store("a"), *rng.sample(others, min(peers, len(others))))
            held = Held(key_of(version, unit=unit, kind="gradient"), holders)
            kept[held.key] = held
            recopies.came(held)
        go_on()
        if rng.random() < 0.1:
            from_version = version
            kept = {key: held for key, held in kept.items() if key.version >= version}
        if rng.random() < 0.2:
            full = {store(pod) for pod in names[1:] if rng.random() < 0.5}
    full = {store(pod) for pod in rng.sample(names[1:], len(names) - 1 - peers)}
    for version in range(16, 64):
        recopies.came(Held(key_of(version, kind="gradient"), (store("a"),)))
        for _ in range(20):
            go_on()
    assert [held.key for held in kept.values() if is_short(held)] == []
    assert not recopies.is_waiting
    assert not on_their_way


def test_a_store_that_started_again_in_its_pod_keeps_nothing_of_what_was_there_before() -> None:
    before = store("a", before="-before")
    few = with_stores(make_plan({0: ["a.1"], 1: ["b.1"]}))
    assert sent(few, "b", before, "b") == [("a",)]
    assert sent(few, "a", before, "b") == [], "it has nothing to send"
    (to,) = sent(GRID, "a", "a", store("b", before="-before"))
    assert len(to) == 1


def test_a_store_that_took_it_for_two_plans_counts_once_and_one_that_is_gone_does_not() -> None:
    recopies = adopted(plan=GRID)
    holders = recopies.holders_after((store("gone"), store("b"), store("c")), store("d"))
    assert holders == (store("b"), store("c"), store("d"))
    assert recopies.holders_after(holders, store("d")) == holders
    few = with_stores(make_plan({0: ["a.1", "b.1"]}))
    recopies.adopt(few, peers=1, domains=2)
    assert recopies.holders_after(holders, store("a")) == (store("b"), store("a"))


@pytest.mark.parametrize("seed", range(30))
def test_whatever_plans_come_nothing_is_sent_twice_at_a_time_and_nothing_is_left_short(
    seed: int,
) -> None:
    """Stores come and go, and some that are named take nothing for a while."""
    rng = random.Random(seed)
    names, peers = "abcdefg"[: rng.randint(3, 7)], rng.randint(1, 3)
    recopies = Recopies(PodUid("a"))
    kept: dict[SegmentKey, Held] = {}
    on_their_way: list[tuple[Recopy, Holder]] = []
    named = names

    def adopt(now: str) -> None:
        chain = make_plan({n: [f"{pod}.1"] for n, pod in enumerate(now)})
        recopies.adopt(with_stores(chain), peers=peers, domains=2)

    def look_and_answer(num_answers: int, fails: float) -> None:
        for recopy in look(recopies, *kept.values()):
            for to in recopy.to:
                assert (recopy.key, to) not in {(r.key, h) for r, h in on_their_way}
                on_their_way.append((recopy, to))
        rng.shuffle(on_their_way)
        for recopy, to in [on_their_way.pop() for _ in range(num_answers)]:
            is_kept = rng.random() >= fails
            if is_kept:
                held = kept[recopy.key]
                holders = recopies.holders_after(held.holders, to)
                kept[recopy.key] = held._replace(holders=holders)
            recopies.answered(recopy, to, is_kept=is_kept)

    adopt(named)
    for version in range(1, 40):
        others = [store(pod) for pod in named[1:]] + [store("gone")] * rng.randint(0, peers)
        holders = (store("a"), *rng.sample(others, min(peers, len(others))))
        held = Held(key_of(version, kind="gradient"), holders)
        kept[held.key] = held
        recopies.came(held)
        look_and_answer(rng.randint(0, len(on_their_way)), 0.3)
        if rng.random() < 0.4:
            named = "a" + "".join(pod for pod in names[1:] if rng.random() < 0.7)
            adopt(named)
            # What a store that has gone had is gone, and so is what was on its way there.
            living = {store(pod) for pod in named}
            on_their_way[:] = [way for way in on_their_way if way[1] in living]
            for key, held in kept.items():
                kept[key] = held._replace(holders=tuple(h for h in held.holders if h in living))
    for version in range(40, 60):
        whole = tuple(map(store, named[: 1 + peers]))
        held = Held(key_of(version, kind="gradient"), whole)
        kept[held.key] = held
        recopies.came(held)
        for _ in range(20):
            look_and_answer(len(on_their_way), 0.0)
    wanted = 1 + min(peers, len(named) - 1)
    living = {store(pod) for pod in named}
    assert [k for k, held in kept.items() if len(living.intersection(held.holders)) < wanted] == []
    assert not recopies.is_waiting


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
