"""Which states stores of segments can make anew, against a twin that tries every way."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.core.plans import make_plan

from mainstay_core.base import codec
from mainstay_core.base.frames import MAX_BODY_BYTES
from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.replaying import (
    Stores,
    UnfinishedReplay,
    bytes_to_tell,
    needs_stores,
    others_to_ask,
    points_to_apply,
    speaks_for_store,
)
from mainstay_core.segments.report_sizes import MAX_TOLD_BYTES
from mainstay_core.wire.plan import OtherStore
from mainstay_core.wire.segments import (
    BadSegment,
    Holder,
    Run,
    SegmentKey,
    SegmentKind,
    StoreReport,
    UnitHeld,
)
from mainstay_core.wire.votes import Commit, CommitRecord, SettleReport, seal_record

LINEAGE = 3
STATE, GRADIENT = SegmentKind.STATE, SegmentKind.GRADIENT


def key_of(position: int, unit: int, kind: SegmentKind, version: int) -> SegmentKey:
    return SegmentKey(lineage=LINEAGE, position=position, unit=unit, kind=kind, version=version)


def record_of(step: int, lineage: int = LINEAGE, **fields: object) -> CommitRecord:
    commit = Commit(step=step, norm=1.0, scale=0.5, tokens=4, loss=2.0, data="0" * 32)
    given: dict[str, object] = {
        "certified_in": "q1-n",
        "chain": f"{step:032x}",
        "gradients": ("a" * 32,) * 2,
        "states": ("b" * 32,) * 2,
    }
    given |= {"lineage": lineage, "commit": commit}
    return seal_record(CommitRecord(**(given | fields)))  # type: ignore[arg-type]


@dataclass
class Pod:
    """What one pod's store holds, as plain sets."""

    name: str
    lineage: int = LINEAGE
    num_units: int = 2
    segments: set[SegmentKey] = field(default_factory=set)
    records: set[int] = field(default_factory=set)
    bad: list[BadSegment] = field(default_factory=list)

    @property
    def holder(self) -> Holder:
        return Holder(pod=PodUid(self.name), address=f"{self.name}:1")

    def report(self) -> StoreReport:
        places = sorted({(key.position, key.unit) for key in self.segments})
        return StoreReport(
            pod=PodUid(self.name),
            address=f"{self.name}:1",
            lineage=self.lineage,
            units=tuple(self._held(*place) for place in places),
            records=tuple(record_of(step, self.lineage) for step in sorted(self.records)),
            bad=tuple(self.bad),
        )

    def _held(self, position: int, unit: int) -> UnitHeld:
        mine = [k for k in self.segments if (k.position, k.unit) == (position, unit)]
        runs: list[Run] = []
        for step in sorted(k.version for k in mine if k.kind is GRADIENT):
            if runs and runs[-1].last == step - 1:
                runs[-1] = replace(runs[-1], last=step)
            else:
                runs.append(Run(first=step, last=step))
        return UnitHeld(
            position=position,
            unit=unit,
            unit_name=f"block{unit}",
            num_units=self.num_units,
            states=tuple(sorted(k.version for k in mine if k.kind is STATE)),
            gradients=tuple(runs),
        )


# The twin -----------------------------------------------------------------------------


def size_of(pods: Sequence[Pod], position: int) -> int:
    """Return how many units a position has: as most copies of one say."""
    held = {(p.name, k.unit, p.num_units) for p in pods for k in p.segments
            if p.lineage == LINEAGE and k.position == position}  # fmt: skip
    said = [size for _, _, size in held]
    is_whole = {s: {u for _, u, size in held if size == s} >= set(range(s)) for s in said}
    return max(said, key=lambda s: (said.count(s), is_whole[s], s), default=0)


def keepers(pods: Sequence[Pod], key: SegmentKey) -> set[str]:
    """Return the pods that hold a good copy of a segment."""
    told = [bad for pod in pods if pod.lineage == LINEAGE for bad in pod.bad]
    return {
        pod.name
        for pod in pods
        if pod.lineage == LINEAGE
        and pod.num_units == size_of(pods, key.position)
        and key in pod.segments
        and not any(bad.key == key and bad.pod == pod.name for bad in told)
    }


def known_steps(pods: Sequence[Pod]) -> set[int]:
    return {step for pod in pods if pod.lineage == LINEAGE for step in pod.records}


def starts(pods: Sequence[Pod], position: int, unit: int, version: int) -> list[int]:
    """Return the states of a unit from which a version can be reached, every one tried."""
    return [
        state
        for state in range(version + 1)
        if keepers(pods, key_of(position, unit, STATE, state))
        and state in known_steps(pods)
        and all(
            step in known_steps(pods) and keepers(pods, key_of(position, unit, GRADIENT, step))
            for step in range(state, version)
        )
    ]


def twin_reach(pods: Sequence[Pod], position: int, top: int) -> set[int]:
    units = range(size_of(pods, position))
    if not units:
        return set()
    return {v for v in range(top + 1) if all(starts(pods, position, u, v) for u in units)}


def random_pods(rng: random.Random, versions: int) -> list[Pod]:
    share = rng.choice((0.3, 0.6, 0.9))
    num_units = rng.randint(1, 3)
    pods = []
    for number in range(rng.randint(1, 4)):
        pod = Pod(f"p{number}", num_units=num_units)
        if rng.random() < 0.1:
            pod.lineage = LINEAGE - 1
        if rng.random() < 0.05:
            pod.num_units += 1
        for position in range(2):
            for unit in range(num_units):
                for version in range(versions):
                    if rng.random() < share / 2:
                        pod.segments.add(key_of(position, unit, STATE, version))
                    if rng.random() < share:
                        pod.segments.add(key_of(position, unit, GRADIENT, version))
        pod.records = {step for step in range(versions) if rng.random() < 0.8}
        pods.append(pod)
    for pod in pods:
        for other in pods:
            some = sorted(other.segments)
            for key in rng.sample(some, min(len(some), rng.choice((0, 0, 1, 3)))):
                pod.bad.append(BadSegment(key=key, pod=PodUid(other.name)))
    return pods


@pytest.mark.parametrize("seed", range(60))
def test_what_stores_reach_and_how_equals_the_twin_that_tries_every_state(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        versions = rng.randint(1, 7)
        pods = random_pods(rng, versions)
        stores = Stores([pod.report() for pod in pods], LINEAGE)
        for position in range(3):
            reach = twin_reach(pods, position, versions)
            assert stores.reach(position) == reach
            for version in range(versions + 1):
                check_replay(pods, stores, position, version, version in reach)


def check_replay(
    pods: Sequence[Pod], stores: Stores, position: int, version: int, able: bool
) -> None:
    replay = stores.plan_replay(position, version)
    assert (replay is not None) == able
    if replay is None:
        assert stores.why_not(position, version)
        return
    assert stores.why_not(position, version) == ""
    assert [unit.unit for unit in replay.units] == list(range(len(replay.units)))
    for unit in replay.units:
        newest = max(starts(pods, position, unit.unit, version))
        assert unit.state == key_of(position, unit.unit, STATE, newest)
        wanted = [key_of(position, unit.unit, GRADIENT, s) for s in range(newest, version)]
        assert [key for key, _ in unit.gradients] == wanted
        copies = [(unit.state, unit.state_holders), *unit.gradients]
        for key, holders in copies:
            assert {holder.pod for holder in holders} == keepers(pods, key)
            assert len(holders) == len({holder.pod for holder in holders})
    assert [r.commit.step for r in replay.records] == list(range(replay.first_step, version))


def test_the_order_of_reports_changes_nothing() -> None:
    rng = random.Random(5)
    for _ in range(40):
        reports = [pod.report() for pod in random_pods(rng, 5)]
        shuffled = rng.sample(reports, len(reports))
        one, other = Stores(reports, LINEAGE), Stores(shuffled, LINEAGE)
        assert one.records == other.records
        for position in range(2):
            for version in range(6):
                assert one.plan_replay(position, version) == other.plan_replay(position, version)


def test_what_travels_is_enough() -> None:
    rng = random.Random(6)
    for _ in range(20):
        reports = [pod.report() for pod in random_pods(rng, 5)]
        travelled = [codec.decode(StoreReport, codec.encode(report)) for report in reports]
        assert travelled == reports


# Cases --------------------------------------------------------------------------------


def pod(name: str, *segments: SegmentKey, records: Sequence[int] = (), **fields: object) -> Pod:
    given: dict[str, object] = {"num_units": 1}
    return Pod(name, segments=set(segments), records=set(records), **(given | fields))  # type: ignore[arg-type]


def stores_of(*pods: Pod) -> Stores:
    return Stores([p.report() for p in pods], LINEAGE)


def test_a_step_whose_commit_nobody_knows_is_not_applied_again() -> None:
    kept = key_of(0, 0, STATE, 4), key_of(0, 0, GRADIENT, 4), key_of(0, 0, GRADIENT, 5)

    assert stores_of(pod("a", *kept, records=[4])).reach(0) == {4, 5}
    assert stores_of(pod("a", *kept), pod("b", records=[5])).reach(0) == set()


def test_a_state_that_no_vote_is_known_to_have_judged_is_not_used() -> None:
    states = [key_of(0, 0, STATE, version) for version in (4, 5)]
    step = key_of(0, 0, GRADIENT, 4)

    stores = stores_of(pod("a", *states, step, records=[4]))
    assert stores.reach(0) == {4, 5}
    replay = stores.plan_replay(0, 5)
    assert replay is not None
    assert (replay.first_step, replay.next) == (4, None), "the newer state is not believed"

    judged = stores_of(pod("a", *states, step, records=[4, 5])).plan_replay(0, 5)
    assert judged is not None
    assert (judged.first_step, judged.next) == (5, record_of(5))
    rolled = record_of(4, states=(), gradients=())
    bare = replace(pod("a", *states, step).report(), records=(rolled,))
    assert Stores([bare], LINEAGE).reach(0) == set()


def test_a_damaged_copy_is_left_out_and_another_one_is_used() -> None:
    state, step = key_of(0, 0, STATE, 4), key_of(0, 0, GRADIENT, 4)
    bad = [BadSegment(key=step, pod=PodUid("a"))]
    one = pod("a", state, step, records=[4])
    other = pod("b", step, bad=bad)

    replay = stores_of(one, other).plan_replay(0, 5)
    assert replay is not None
    ((_, holders),) = replay.units[0].gradients
    assert [holder.pod for holder in holders] == ["b"]

    worse = [*bad, BadSegment(key=step, pod=PodUid("b"))]
    left = stores_of(one, replace(other, bad=worse))
    assert left.reach(0) == {4}
    assert "block0 of position 0 does not reach version 5" in left.why_not(0, 5)


def test_the_reason_names_pods_and_the_failure_domains_that_are_known() -> None:
    held = pod("a", key_of(0, 0, STATE, 4), records=[4]), pod("b", key_of(0, 0, STATE, 3))
    domains = {PodUid("a"): "node-1"}
    stores = Stores([one.report() for one in held], LINEAGE, domains)

    assert stores.why_not(0, 5) == (
        "unit block0 of position 0 does not reach version 5: its states at [3, 4] and the "
        "gradients since, on a (failure domain node-1), b, have gaps"
    )


def test_a_damaged_copy_in_the_middle_of_a_run_leaves_both_its_ends() -> None:
    steps = [key_of(0, 0, GRADIENT, s) for s in range(3, 8)]
    states = [key_of(0, 0, STATE, 3), key_of(0, 0, STATE, 6)]
    bad = [BadSegment(key=steps[2], pod=PodUid("a"))]

    stores = stores_of(pod("a", *steps, *states, records=range(3, 8), bad=bad))
    assert stores.reach(0) == {3, 4, 5, 6, 7, 8}
    assert stores.plan_replay(0, 5).first_step == 3  # type: ignore[union-attr]
    assert stores.plan_replay(0, 8).first_step == 6  # type: ignore[union-attr]


def test_segments_and_records_of_another_lineage_count_for_nothing() -> None:
    kept = key_of(0, 0, STATE, 4), key_of(0, 0, GRADIENT, 4)

    assert stores_of(pod("a", *kept, records=[4], lineage=LINEAGE + 1)).reach(0) == frozenset()
    assert stores_of(pod("a", *kept), pod("b", records=[4], lineage=2)).reach(0) == set()
    assert stores_of(pod("a", *kept), pod("b", records=[4])).reach(0) == {4, 5}


def test_a_position_with_a_unit_that_nobody_keeps_is_not_made_anew() -> None:
    stores = stores_of(pod("a", key_of(0, 1, STATE, 4), num_units=2))

    assert stores.reach(0) == frozenset()
    assert stores.why_not(0, 4) == "no store holds unit 0 of position 0"
    assert stores.why_not(1, 4) == "no store holds anything of position 1"


def test_the_record_with_digests_counts_before_that_of_who_rolled_forward() -> None:
    bare = record_of(4, gradients=(), states=())
    reports = [
        StoreReport(pod=PodUid(p), address=p, lineage=LINEAGE, records=(record,))
        for p, record in (("a", bare), ("b", record_of(4)), ("c", bare))
    ]

    for some in (reports, reports[::-1]):
        assert Stores(some, LINEAGE).records[4].states


# When stores are asked ----------------------------------------------------------------


def report(index: int, **fields: object) -> SettleReport:
    given: dict[str, object] = {"valid": True, "settled": 1, "version": 4}
    return SettleReport(index=index, **(given | fields))  # type: ignore[arg-type]


def asks(plan_since: Mapping[str, int], *reports: SettleReport) -> bool:
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, quorum=2, since=plan_since)
    return needs_stores(plan, reports)


def test_stores_are_asked_where_a_position_has_nobody_who_stayed() -> None:
    # Members are in order of positions: 0 and 1 are of position 0, 2 and 3 of position 1.
    stayed = dict.fromkeys(("a.1", "b.1", "c.1", "d.1"), 0)
    all_here = [report(index) for index in range(4)]

    assert not asks(stayed, *all_here)
    assert not asks(stayed, *all_here[:3], report(3, valid=False))
    assert asks(stayed, *all_here[:2], report(2, valid=False), report(3, valid=False))
    assert asks(stayed, *all_here[:2], report(2, lineage=1), report(3, valid=False))
    assert asks({**stayed, "d.1": 2}, *all_here[:2], report(2, valid=False), report(3))


def test_one_member_of_each_pod_speaks_for_its_store() -> None:
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "a.1"]})

    assert [speaks_for_store(plan, m.index) for m in plan.members] == [True, True, True, False]


@pytest.mark.parametrize("num_others", [0, 1, 9, 4000])
def test_the_reports_of_all_stores_fit_into_one_frame(num_others: int) -> None:
    others = tuple(
        OtherStore(pod=PodUid(f"s{number}"), address=f"s{number}:1") for number in range(num_others)
    )
    plan = replace(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "a.1"]}), other_stores=others)
    rooms = [bytes_to_tell(plan, member.index) for member in plan.members]

    assert sum(rooms) <= MAX_BODY_BYTES
    each = MAX_TOLD_BYTES // (3 + num_others)
    told = [
        speaks_for_store(plan, m.index) + len(others_to_ask(plan, m.index)) for m in plan.members
    ]
    assert all(room >= each * number for room, number in zip(rooms, told, strict=True))


@pytest.mark.parametrize("num_others", [0, 1, 4, 9])
def test_each_store_of_a_pod_without_a_member_is_asked_by_one_member(num_others: int) -> None:
    others = tuple(
        OtherStore(pod=PodUid(f"s{number}"), address=f"s{number}:1") for number in range(num_others)
    )
    plan = replace(make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}), other_stores=others)
    asked = [others_to_ask(plan, member.index) for member in plan.members]

    assert sorted(o.pod for mine in asked for o in mine) == sorted(o.pod for o in others)
    assert max(map(len, asked)) - min(map(len, asked)) <= 1


@pytest.mark.parametrize(
    ("quorum", "lineage", "goes_on"), [(8, 0, True), (9, 0, False), (8, 1, False), (7, 0, False)]
)
def test_only_the_very_next_quorum_goes_on_with_an_unfinished_replay(
    quorum: int, lineage: int, goes_on: bool
) -> None:
    unfinished = UnfinishedReplay[str]()
    plan = replace(make_plan({0: ["a"]}, quorum=quorum), lineage=lineage)
    assert unfinished.take(plan) is None, "nothing was left"

    unfinished.keep(make_plan({0: ["a"]}, quorum=7), "replay")
    assert unfinished.take(plan) == ("replay" if goes_on else None)
    assert unfinished.take(plan) is None, "what it made is what goes on now, or is void"


def test_nothing_goes_on_with_a_replay_that_was_forgotten() -> None:
    unfinished = UnfinishedReplay[str]()
    unfinished.keep(make_plan({0: ["a"]}, quorum=7), "replay")
    unfinished.forget()
    assert unfinished.take(make_plan({0: ["a"]}, quorum=8)) is None


@pytest.mark.parametrize(
    ("applied", "differing", "points"),
    [
        ([0, 1, 2], [2, 0, 1], True),
        ([0, 1, 2], [0, 1], False),
        ([0, 1], [0], False),
        # Of one unit alone nobody can tell.
        ([4], [4], False),
        ([], [], False),
    ],
)
def test_a_step_that_comes_out_wrong_in_all_of_several_units_points_to_its_apply(
    applied: list[int], differing: list[int], points: bool
) -> None:
    assert points_to_apply(applied, differing) is points
