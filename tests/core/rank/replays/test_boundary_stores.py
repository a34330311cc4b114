"""Which states of lost stages can be computed again, against a twin that tries every beginning."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.core.plans import make_plan
from tests.core.rank.replays.test_replaying import record_of

from mainstay_core.base.ids import PodUid
from mainstay_core.rank.replays.boundaries import logged_again, relay_holders, replaying_members
from mainstay_core.rank.replays.boundary_stores import BoundaryStores
from mainstay_core.wire.plan import Plan, Rendezvous
from mainstay_core.wire.segments import (
    BadSegment,
    Holder,
    LogsHeld,
    Run,
    SegmentKey,
    SegmentKind,
    StoreReport,
    UnitHeld,
    boundary_key,
)

LINEAGE = 3
NUM_STAGES, NUM_UNITS, NUM_TYPES = 3, 2, 2
STATE, COMPUTE = SegmentKind.STATE, SegmentKind.COMPUTE
ACTIVATION, INPUT_GRADIENT = SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT
COMMITTED, REFUSED = "q1-n", "q0-n"
"""The quorum of every record, and one that committed nothing."""


def plan_of(width: int = 1) -> Plan:
    """A pipeline of three stages with one replica, of two types; ``width`` inner ranks a stage."""
    slots = [f"{pod}.{inner + 1}" for pod in "abc" for inner in range(width)]
    plan = make_plan({0: slots}, lanes=1, shards_per_lane=NUM_TYPES, ranks_per_stage=width)
    hosts = [
        Rendezvous(pod=PodUid(pod), gather=f"{pod}:1", snapshots=f"{pod}:2", domain=f"node-{pod}")
        for pod in "abc"
    ]
    return replace(plan, lineage=LINEAGE, hosts=tuple(hosts))


Log = tuple[int, SegmentKind, int, int, str]
"""(position, kind, step, type, quorum of the vote)"""


@dataclass
class Pod:
    """What one pod's store holds, as plain sets."""

    name: str
    units: set[tuple[int, int, SegmentKind, int]] = field(default_factory=set)
    """(position, unit, kind, version)"""
    logs: set[Log] = field(default_factory=set)
    records: dict[int, bool] = field(default_factory=dict)
    """By step: whether what votes told is in it."""
    bad: list[BadSegment] = field(default_factory=list)

    def report(self) -> StoreReport:
        places = sorted({(position, unit) for position, unit, _, _ in self.units})
        return StoreReport(
            pod=PodUid(self.name),
            address=f"{self.name}:1",
            lineage=LINEAGE,
            units=tuple(self._held(*place) for place in places),
            records=tuple(
                record_of(step, states=("s",) * 2 * NUM_STAGES if told else ())
                for step, told in sorted(self.records.items())
            ),
            logs=tuple(
                LogsHeld(
                    position=position,
                    kind=kind,
                    voted_in=quorum,
                    first_step=step,
                    last_step=step,
                    first_type=shard_type,
                    last_type=shard_type,
                    micro_batches=1,
                )
                for position, kind, step, shard_type, quorum in sorted(self.logs)
            ),
            bad=tuple(self.bad),
        )

    def _held(self, position: int, unit: int) -> UnitHeld:
        def versions(kind: SegmentKind) -> list[int]:
            return sorted(v for p, u, k, v in self.units if (p, u, k) == (position, unit, kind))

        return UnitHeld(
            position=position,
            unit=unit,
            unit_name=f"block{unit}",
            num_units=NUM_UNITS,
            states=tuple(versions(STATE)),
            computes=tuple(Run(first=v, last=v) for v in versions(COMPUTE)),
        )


# The twin ----------------------------------------------------------------------------------


def twin_reach(
    pods: Sequence[Pod], position: int, lost: Collection[int], most: int, width: int = 1
) -> set[int]:
    """Return what can be reached, every beginning and every version tried."""
    first = last = position // width
    stages = {at // width for at in lost}
    while first - 1 in stages:
        first -= 1
    while last + 1 in stages:
        last += 1
    judged = {step for pod in pods for step, told in pod.records.items() if told}
    senders = []
    for inner in range(width):
        if first > 0:
            senders.append(((first - 1) * width + inner, ACTIVATION))
        if last < NUM_STAGES - 1:
            senders.append(((last + 1) * width + inner, INPUT_GRADIENT))
    bad = {(b.pod, b.key) for pod in pods for b in pod.bad}

    def has_unit(stage: int, unit: int, kind: SegmentKind, version: int) -> bool:
        key = SegmentKey(lineage=LINEAGE, position=stage, unit=unit, kind=kind, version=version)
        return any(
            (stage, unit, kind, version) in pod.units and (PodUid(pod.name), key) not in bad
            for pod in pods
        )

    def has_log(sender: int, kind: SegmentKind, step: int, shard_type: int) -> bool:
        key = boundary_key(LINEAGE, sender, kind, step, shard_type, 0)
        return any(
            (sender, kind, step, shard_type, COMMITTED) in pod.logs
            and (PodUid(pod.name), key) not in bad
            for pod in pods
        )

    def comes(start: int, version: int) -> bool:
        steps_are_there = all(
            step in judged
            and all(has_log(s, k, step, t) for s, k in senders for t in range(NUM_TYPES))
            for step in range(start, version)
        )
        return steps_are_there and all(
            any(
                at in judged
                and has_unit(stage, unit, STATE, at)
                and all(has_unit(stage, unit, COMPUTE, v) for v in range(start, at))
                for at in range(start, version + 1)
            )
            for stage in range(first * width, (last + 1) * width)
            for unit in range(NUM_UNITS)
        )

    return {v for v in range(most) for start in range(v + 1) if comes(start, v)}


def draw_pods(rng: random.Random, width: int = 1) -> list[Pod]:
    places = range(NUM_STAGES * width)
    pods = [Pod(name) for name in ("a", "b", "c")]
    share = rng.choice((0.8, 0.9, 1.0))
    first = rng.randrange(2)
    full = {(p, u): first + rng.randrange(3) for p in places for u in range(NUM_UNITS)}
    for pod in pods:
        pod.records = {
            step: rng.random() < 0.9 for step in range(6) if rng.random() < max(share, 0.9)
        }
    for (position, unit), at in full.items():
        for kind, versions in ((STATE, [at]), (COMPUTE, range(first, at))):
            for version in versions:
                for pod in rng.sample(pods, rng.choice((1, 2))):
                    if rng.random() < share:
                        pod.units.add((position, unit, kind, version))
    for sender in places:
        for kind in (ACTIVATION, INPUT_GRADIENT):
            for step in range(first, 6):
                for shard_type in range(NUM_TYPES):
                    pod = rng.choice(pods)
                    if rng.random() < max(share, 0.97):
                        quorum = COMMITTED if rng.random() < 0.97 else REFUSED
                        pod.logs.add((sender, kind, step, shard_type, quorum))
    for pod in pods:
        if rng.random() < 0.3 and pod.logs:
            sender, kind, step, shard_type, _ = rng.choice(sorted(pod.logs))
            key = boundary_key(LINEAGE, sender, kind, step, shard_type, 0)
            rng.choice(pods).bad.append(BadSegment(key=key, pod=PodUid(pod.name)))
        if rng.random() < 0.3 and pod.units:
            position, unit, kind, version = rng.choice(sorted(pod.units))
            key = SegmentKey(
                lineage=LINEAGE, position=position, unit=unit, kind=kind, version=version
            )
            pod.bad.append(BadSegment(key=key, pod=PodUid(pod.name)))
    return pods


@pytest.mark.parametrize("width", [1, 2])
def test_what_is_reached_and_how_equals_a_twin_that_tries_everything(width: int) -> None:
    plan, reached, differing = plan_of(width), 0, 0
    for seed in range(250 // width):
        rng = random.Random(seed)
        pods = draw_pods(rng, width)
        lost = set(rng.sample(range(NUM_STAGES * width), rng.randrange(1, NUM_STAGES + 1)))
        stores = BoundaryStores([pod.report() for pod in pods], plan)
        stages = {position // width for position in lost}
        again = {at for at in range(NUM_STAGES * width) if at // width in stages}
        for position in sorted(again):
            expected = twin_reach(pods, position, lost, 8, width)
            assert stores.reach(position, lost) == expected, seed
            for version in range(8):
                check_replay(stores, position, version, lost, again, possible=version in expected)
            reached += bool(expected)
            differing += bool(expected) and check_cell(stores, position, max(expected), lost, width)
    assert reached > 40, "many of the cases can be reached"
    assert (differing > 10) == (width > 1), "inner ranks often have other units in full"


def check_cell(
    stores: BoundaryStores, position: int, version: int, lost: set[int], width: int
) -> bool:
    """The inner ranks of a stage run the same steps and skip the same weight gradients.

    Returns:
        Whether other units are in full on some inner rank than on this one.
    """
    first = position - position % width
    cell = [stores.plan_replay(first + inner, version, lost) for inner in range(width)]
    steps = [replay.steps for replay in cell if replay is not None]
    assert len({(r.first_step, r.version, r.window) for r in cell if r is not None}) == 1
    for together in zip(*steps, strict=True):
        common = set.intersection(*(set(step.frozen) for step in together))
        assert {step.skipped for step in together} == {tuple(sorted(common))}
    return any(len({step.frozen for step in together}) > 1 for together in zip(*steps, strict=True))


def check_replay(
    stores: BoundaryStores,
    position: int,
    version: int,
    lost: set[int],
    again: set[int],
    *,
    possible: bool,
) -> None:
    width = stores._width
    replay = stores.plan_replay(position, version, lost)
    assert (replay is not None) == possible
    assert bool(stores.why_not(position, version, lost)) == (not possible)
    if replay is None:
        return
    assert [s.record.commit.step for s in replay.steps] == list(range(replay.first_step, version))
    full: set[int] = set()
    for step in replay.steps:
        at = step.record.commit.step
        assert all(load.holders and load.key.version == at for load in step.loads)
        full |= {load.key.unit for load in step.loads if load.key.kind is STATE}
        weights = {load.key.unit for load in step.loads if load.key.kind is COMPUTE}
        assert weights == set(step.frozen) == set(range(NUM_UNITS)) - full
        senders = {(key.position, key.kind) for key, _ in step.inputs}
        beside = {(position - width, ACTIVATION), (position + width, INPUT_GRADIENT)}
        assert senders == {
            (at, kind) for at, kind in beside if 0 <= at < NUM_STAGES * width and at not in again
        }
        assert len(step.inputs) == NUM_TYPES * len(senders)
        assert all(holders for _, holders in step.inputs)
    assert full | {load.key.unit for load in replay.loads} == set(range(NUM_UNITS))
    neighbours = {position - width, position + width}
    assert {relay.position for relay in replay.relays} == neighbours & again


# --- Single rules ------------------------------------------------------------------------------


def whole_pods() -> list[Pod]:
    """Stores from which stage 1 comes again at versions 2 to 4, from version 1."""
    pods = [Pod(name, records=dict.fromkeys(range(1, 5), True)) for name in ("a", "b", "c")]
    pods[0].units = {(1, 0, STATE, 1), (1, 1, COMPUTE, 1), (1, 1, STATE, 2)}
    pods[0].logs = {(0, ACTIVATION, s, t, COMMITTED) for s in range(1, 4) for t in range(2)}
    pods[2].logs = {(2, INPUT_GRADIENT, s, t, COMMITTED) for s in range(1, 4) for t in range(2)}
    return pods


def stores_of(pods: Sequence[Pod]) -> BoundaryStores:
    return BoundaryStores([pod.report() for pod in pods], plan_of())


def test_a_lost_stage_comes_again_with_the_logs_of_both_sides() -> None:
    stores = stores_of(whole_pods())
    assert stores.reach(1, {1}) == {2, 3, 4}
    replay = stores.plan_replay(1, 4, {1})
    assert replay is not None
    assert (replay.first_step, replay.window.length) == (1, 2)
    assert [step.frozen for step in replay.steps] == [(1,), (), ()]


@pytest.mark.parametrize("wrong", [1, 3])
def test_a_store_that_tells_a_wrong_number_of_micro_batches_hides_no_log_of_others(
    wrong: int,
) -> None:
    pods = whole_pods()
    teller = next(pod for pod in pods if pod.logs)
    good = replace(teller, name="z", units=set())  # another store with the same logs

    def report(pod: Pod, micro_batches: int) -> StoreReport:
        told = pod.report()
        logs = tuple(replace(log, micro_batches=micro_batches) for log in told.logs)
        return replace(told, logs=logs)

    reports = [report(pod, wrong if pod is teller else 2) for pod in [*pods, good]]
    replay = BoundaryStores(reports, plan_of()).plan_replay(1, 4, {1})

    assert replay is not None
    (position,) = {at for at, _, _, _, _ in teller.logs}
    for step in replay.steps:
        told = {
            (key.shard_type, key.micro_batch): {holder.pod for holder in holders}
            for key, holders in step.inputs
            if key.position == position
        }
        for shard_type in range(2):
            assert told[shard_type, 0] == {teller.name, "z"}
            assert told[shard_type, 1] == ({"z"} if wrong == 1 else {teller.name, "z"})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda pods: pods[0].logs.remove((0, ACTIVATION, 2, 1, COMMITTED)),
            (
                "stage 1 lacks the activation of position 0, type 1, in step 2; others of its logs "
                "are on a (failure domain node-a)"
            ),
        ),
        (
            lambda pods: pods[2].logs.clear(),
            "stage 1 lacks the input-gradient of position 2, type 0, in step 1",
        ),
        (
            lambda pods: [pod.records.update({3: False}) for pod in pods],
            "no store knows the votes on step 3",
        ),
        (
            lambda pods: pods[0].units.remove((1, 1, STATE, 2)),
            (
                "unit block1 of position 1 has no full state up to version 4 that votes have "
                "judged, on a (failure domain node-a)"
            ),
        ),
        (
            lambda pods: pods[0].units.remove((1, 1, COMPUTE, 1)),
            "no version of stage 1 has all units in the stores, up to version 4",
        ),
        (lambda pods: pods[0].units.clear(), "no store holds anything of position 1"),
    ],
)
def test_the_reason_names_what_is_lacking(spoil: object, told: str) -> None:
    pods = whole_pods()
    assert callable(spoil)
    spoil(pods)
    assert stores_of(pods).why_not(1, 4, {1}) == told


@pytest.mark.parametrize(("full", "reached"), [("a", {2, 3, 4}), ("b", set()), ("c", set())])
def test_a_stretch_whose_members_found_no_room_for_their_logs_is_not_tried_again(
    full: str, reached: set[int]
) -> None:
    pods = whole_pods()
    pods[0].units |= {(2, unit, kind, version) for _, unit, kind, version in pods[0].units}
    reports = [replace(pod.report(), is_full=pod.name == full) for pod in pods]
    stores = BoundaryStores(reports, plan_of())

    assert stores.reach(1, {1, 2}) == stores.reach(2, {1, 2}) == reached
    assert (stores.plan_replay(1, 4, {1, 2}) is None) == (not reached)
    why = f"{full} found no room for what members of stages 1 to 2 give each other"
    assert stores.why_not(1, 4, {1, 2}) == ("" if reached else why)
    assert stores.reach(1, {1}) == {2, 3, 4}, "nobody waits for what a single stage logs"


def test_a_log_of_an_attempt_that_was_refused_does_not_count() -> None:
    pods = whole_pods()
    pods[0].logs.remove((0, ACTIVATION, 2, 1, COMMITTED))
    pods[1].logs.add((0, ACTIVATION, 2, 1, REFUSED))
    assert stores_of(pods).reach(1, {1}) == {2}
    pods[1].logs.add((0, ACTIVATION, 2, 1, COMMITTED))
    assert stores_of(pods).reach(1, {1}) == {2, 3, 4}


def test_a_stage_comes_again_as_soon_as_one_of_its_inner_ranks_is_lost() -> None:
    pods = [Pod(name, records=dict.fromkeys(range(1, 5), True)) for name in ("a", "b", "c")]
    # Inner rank 0 has its second unit in full later than inner rank 1.
    pods[0].units = {(2, 0, STATE, 1), (2, 1, COMPUTE, 1), (2, 1, STATE, 2)}
    pods[1].units = {(3, 0, STATE, 1), (3, 1, STATE, 1)}
    for sender in (0, 1, 4, 5):
        kind = ACTIVATION if sender < 2 else INPUT_GRADIENT
        pods[2].logs |= {(sender, kind, s, t, COMMITTED) for s in range(1, 4) for t in range(2)}
    stores = BoundaryStores([pod.report() for pod in pods], plan_of(2))
    assert stores.reach(2, {2}) == stores.reach(3, {2}) == {2, 3, 4}
    lost, beside = stores.plan_replay(2, 3, {2}), stores.plan_replay(3, 3, {2})
    assert lost is not None
    assert beside is not None
    assert [(step.frozen, step.skipped) for step in lost.steps] == [((1,), ()), ((), ())]
    assert [(step.frozen, step.skipped) for step in beside.steps] == [((), ()), ((), ())]
    assert {key.position for step in beside.steps for key, _ in step.inputs} == {1, 5}
    pods[2].logs = {log for log in pods[2].logs if log[0] != 5}
    stores = BoundaryStores([pod.report() for pod in pods], plan_of(2))
    assert stores.why_not(2, 3, {2}) == (
        "stage 1 lacks the input-gradient of position 5, type 0, in step 1"
    )


def test_a_follower_of_a_stage_with_inner_ranks_computes_nothing_again() -> None:
    plan = make_plan(
        {0: ["a.1", "b.1"]}, followers=[("c.1", 0)], lanes=1, shards_per_lane=2, ranks_per_stage=2
    )
    assert [m.index for m in plan.position_members(0)] == [0, 1]
    assert [m.index for m in replaying_members(plan, 0)] == [0]
    assert logged_again(plan, 0) == (0, 1)
    assert {holder.pod for holder in relay_holders(plan, 0)} == {plan.members[0].slot.pod}


def test_members_of_a_position_share_the_logs_of_a_replay() -> None:
    plan = make_plan({0: ["a.1", "b.1"], 1: ["c.1", "d.1"]}, lanes=2, shards_per_lane=2)
    pods = sorted({member.slot.pod for member in plan.members})
    hosts = (Rendezvous(pod=pod, gather="", store="", snapshots=f"{pod}:1") for pod in pods)
    plan = replace(plan, hosts=tuple(hosts))
    members = [m.index for m in plan.position_members(0)]
    shares = [logged_again(plan, index) for index in members]
    assert sorted(t for share in shares for t in share) == list(range(4))
    holders = relay_holders(plan, 0)
    for index, share in zip(members, shares, strict=True):
        pod = plan.members[index].slot.pod
        assert {holders[t] for t in share} == {Holder(pod=pod, address=f"{pod}:1")}
