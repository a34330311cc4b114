"""Which losses are survived by boundary logs, against a twin, and against a settle's rule."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import combinations

import pytest
from tests.core.rank.replays.test_boundary_stores import (
    COMMITTED,
    LINEAGE,
    NUM_STAGES,
    NUM_TYPES,
    Pod,
    draw_pods,
    plan_of,
    twin_reach,
)

from mainstay_core.base.ids import PodUid
from mainstay_core.job.config import LogKind
from mainstay_core.rank.replays.boundary_stores import BoundaryStores
from mainstay_core.snapshots.coverage import CoveredPod, cover, describe, summarize
from mainstay_core.wire.segments import Run, SegmentKind, runs_of
from mainstay_core.wire.stores import CommittedSteps, PositionCoverage, StoreStatus, UnitsHeld

PLACES = tuple((stage, 0) for stage in range(NUM_STAGES))
CELLS = tuple((stage, inner) for stage in range(NUM_STAGES) for inner in range(2))
"""The positions with two ranks to a stage."""
MOST = 8
"""Versions that are drawn are below this one."""


def covered(pod: Pod, *serves: int, domain: str = "") -> CoveredPod:
    """Return a pod as the api sees it, with what its store tells."""
    report = pod.report()
    store = StoreStatus(
        pod=PodUid(pod.name),
        memory_bytes=100,
        used_bytes=10,
        lineage=LINEAGE,
        units=tuple(
            UnitsHeld(
                position=u.position,
                num_units=u.num_units,
                units=tuple(runs_of([u.unit])),
                states=u.states,
                computes=u.computes,
            )
            for u in report.units
        ),
        judged=tuple(runs_of(step for step, told in sorted(pod.records.items()) if told)),
        logs=report.logs,
        certified=tuple(
            CommittedSteps(quorum=COMMITTED, first=run.first, last=run.last)
            for run in runs_of(sorted(pod.records))
        ),
    )
    return CoveredPod(
        uid=PodUid(pod.name),
        name=pod.name,
        domain=domain or pod.name,
        positions=frozenset(serves),
        store=store,
    )


def draw(rng: random.Random, width: int = 1) -> tuple[dict[str, Pod], list[CoveredPod]]:
    """Return pods' stores, most with one stage of a pipeline, and how they are seen."""
    pods = draw_pods(rng, width)
    for pod in pods:
        pod.bad.clear()  # a status does not tell what readers found
    if rng.random() < 0.5:
        units, logs = {u for pod in pods for u in pod.units}, {x for pod in pods for x in pod.logs}
        for pod in pods:
            pod.units |= {unit for unit in sorted(units) if rng.random() < 0.95}
            pod.logs |= {log for log in sorted(logs) if rng.random() < 0.95}
    seen = []
    for number, pod in enumerate(pods):
        serves = [position for position in range(NUM_STAGES * width) if rng.random() < 0.15]
        serves += [number * width + inner for inner in range(width) if rng.random() < 0.7]
        seen.append(covered(pod, *serves, domain=rng.choice("xy")))
    return {pod.name: pod for pod in pods}, seen


def newest_of(pod: Pod) -> int | None:
    steps = [step for step, told in pod.records.items() if told]
    steps += [step for _, _, step, _, _ in pod.logs]
    return max(steps, default=None)


def reaches(
    pods: Sequence[Pod],
    position: int,
    lost: Collection[int],
    training: Collection[str],
    width: int = 1,
) -> bool:
    """Whether some version is reached that all stores which are needed have told of."""
    first = last = position // width
    stages = {at // width for at in lost}
    while first - 1 in stages:
        first -= 1
    while last + 1 in stages:
        last += 1
    senders = {(first - 1, SegmentKind.ACTIVATION), (last + 1, SegmentKind.INPUT_GRADIENT)}
    newest = {
        pod.name: step
        for pod in pods
        if any(first <= at // width <= last for at, _, _, _ in pod.units)
        or any((at // width, kind) in senders for at, kind, _, _, _ in pod.logs)
        if (step := newest_of(pod)) is not None
    }
    of_training = [step for name, step in newest.items() if name in training]
    needed = min(of_training or newest.values(), default=0)
    return any(version >= needed for version in twin_reach(pods, position, lost, MOST, width))


@pytest.mark.parametrize("places", [PLACES, CELLS])
def test_coverage_is_what_trying_everything_says(places: Sequence[tuple[int, int]]) -> None:
    num_covered = num_lost = 0
    width = len(places) // NUM_STAGES
    for seed in range(150 // width):
        rng = random.Random(seed)
        pods, seen = draw(rng, width)
        members = {s: {p.name for p in seen if s in p.positions} for s in range(len(places))}
        training = {p.name for p in seen if p.positions}
        coverage = cover(places, seen, LINEAGE, NUM_TYPES)
        for told in coverage:
            without = {s for s in members if not members[s]} | {told.position}
            expected = reaches([*pods.values()], told.position, without, training, width)
            assert told.is_covered == expected
            assert bool(told.why_not) == (not expected)
            assert told.stretch is not None
            together = range(told.stretch.first, told.stretch.last + 1)
            assert {*together} == joined(told.position, without, width)
            num_covered += expected
            num_lost += check_losses(told, pods, seen, members, training, width)
    assert num_covered > 40
    assert num_lost > 40 // width


def joined(position: int, lost: Collection[int], width: int) -> set[int]:
    """Return the positions that are replayed with a lost one: one cell after the other is added."""
    stages = {position // width}
    while beside := {p // width for p in lost} & {s + d for s in stages for d in (-1, 1)} - stages:
        stages |= beside
    return {stage * width + inner for stage in stages for inner in range(width)}


def check_losses(
    told: PositionCoverage,
    pods: dict[str, Pod],
    seen: Sequence[CoveredPod],
    members: dict[int, set[str]],
    training: set[str],
    width: int,
) -> int:
    """Check each pod's and each domain's loss; return how many are survived by stores alone."""
    found = 0
    losses = [(told.pods, p.name, {p.name}) for p in seen]
    for domain in sorted({p.domain for p in seen}):
        losses += [(told.domains, domain, {p.name for p in seen if p.domain == domain})]
    for named, name, gone in losses:
        touched = any(pods[n].units or pods[n].logs or n in training for n in gone)
        lost = {s for s in members if members[s] <= gone}
        left = [pod for pod in pods.values() if pod.name not in gone]
        by_stores = told.position in lost and reaches(left, told.position, lost, training, width)
        survives = told.position not in lost or by_stores
        assert (name in named) == (touched and not survives)
        found += by_stores
    return found


def test_what_a_settle_can_compute_again_counts_as_covered_with_as_many_steps() -> None:
    found = 0
    for seed in range(1000, 1150):
        rng = random.Random(seed)
        pods, seen = draw(rng)
        plan, reports = plan_of(), [pod.report() for pod in pods.values()]
        stores = BoundaryStores(reports, plan)
        newest = max((n for p in pods.values() if (n := newest_of(p)) is not None), default=0)
        members = {s for p in seen for s in p.positions}
        for told in cover(PLACES, seen, LINEAGE, NUM_TYPES):
            lost = {*range(NUM_STAGES)} - members | {told.position}
            reached = stores.reach(told.position, lost)
            if newest + 1 in reached:
                assert told.is_covered
            if told.is_covered:
                replay = stores.plan_replay(told.position, max(reached), lost)
                assert replay is not None
                assert told.replay_steps == len(replay.steps)
                together = replay.stretch.positions(1)
                assert told.stretch == Run(first=together[0], last=together[-1])
                found += 1
    assert found > 40


def pipeline() -> list[Pod]:
    """Stage n in pod n: each keeps the units of the stage before too, and its own logs."""
    pods = [Pod(name) for name in ("a", "b", "c")]
    for stage, pod in enumerate(pods):
        pod.records = dict.fromkeys(range(6), True)
        for unit in (0, 1):
            for holder in (pod, pods[(stage + 1) % NUM_STAGES]):
                holder.units.add((stage, unit, SegmentKind.STATE, 2 + unit))
                if unit:
                    holder.units.add((stage, unit, SegmentKind.COMPUTE, 2))
        for kind in (SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT):
            pod.logs |= {(stage, kind, step, t, COMMITTED) for step in range(6) for t in (0, 1)}
    return pods


def test_the_loss_of_one_stage_is_survived_by_the_logs_beside_it() -> None:
    seen = [covered(pod, stage) for stage, pod in enumerate(pipeline())]
    coverage = cover(PLACES, seen, LINEAGE, NUM_TYPES)
    assert [(p.is_covered, p.pods, p.num_copies, p.replay_steps) for p in coverage] == [
        (True, (), 2, 4)
    ] * NUM_STAGES
    assert describe(coverage, LogKind.BOUNDARY) == (
        "the loss of any one pod is survived; the loss of all trainers of any one stage, whose "
        "pods live, is survived"
    )
    summary = summarize(coverage, seen, LINEAGE, log=LogKind.BOUNDARY, ordering="Popularity")
    assert (summary.log, summary.ordering) == ("boundary", "Popularity")


@pytest.mark.parametrize(
    ("lost", "who", "joining"),
    [
        ({1}, "s1 is", "it: s0 (s0 to s1 together), s2 (s1 to s2 together)"),
        ({0}, "s0 is", "it: s1 (s0 to s1 together)"),
        ({0, 2}, "s0, s2 are", "them: s1 (s0 to s2 together)"),
        ({0, 1}, "s0 to s1 are", "them: s2 (s0 to s2 together)"),
    ],
)
def test_while_a_stage_is_made_anew_it_is_said_whose_loss_would_join_it(
    lost: set[int], who: str, joining: str
) -> None:
    pods = pipeline()
    stretches = {(s.stage, s.stretch) for s in cover_while_lost(pods, lost)}
    for stage in range(NUM_STAGES):
        expected = joined(stage, lost | {stage}, 1)
        assert (stage, Run(first=min(expected), last=max(expected))) in stretches
    told = f"{who} being made anew; a further loss of these would join {joining}"
    assert told in describe(cover_while_lost(pods, lost), LogKind.BOUNDARY)


def cover_while_lost(pods: Sequence[Pod], lost: Collection[int]) -> tuple[PositionCoverage, ...]:
    """Return what is covered while the trainers of some stages are gone, and their pods live."""
    seen = [covered(pod, *({stage} - {*lost})) for stage, pod in enumerate(pods)]
    return cover(PLACES, seen, LINEAGE, NUM_TYPES)


def test_nothing_joins_a_stage_that_is_made_anew_once_it_has_a_member_again() -> None:
    """Then the stages beside it are covered by its logs, or are named as not covered."""
    pods = pipeline()
    assert "made anew" not in describe(cover_while_lost(pods, ()), LogKind.BOUNDARY)
    pods[1].logs.clear()
    told = describe(cover_while_lost(pods, ()), LogKind.BOUNDARY)
    assert "being made anew" not in told
    assert "s0: stage 0 lacks the input-gradient of stage 1" in told


def test_where_all_are_made_anew_nothing_is_left_that_could_join() -> None:
    told = describe(cover_while_lost(pipeline(), range(NUM_STAGES)), LogKind.BOUNDARY)
    assert "s0 to s2 are being made anew; no further loss would join them" in told


def test_a_rank_of_a_cell_that_is_lost_is_made_anew_with_all_ranks_of_the_cell() -> None:
    stages = [p.stretch for p in cover(CELLS, [], LINEAGE, NUM_TYPES)]
    assert stages == [Run(first=0, last=len(CELLS) - 1)] * len(CELLS)
    members = CoveredPod(
        uid=PodUid("a"), name="a", domain="a", positions=frozenset(range(len(CELLS)))
    )
    stages = [p.stretch for p in cover(CELLS, [members], LINEAGE, NUM_TYPES)]
    assert stages == [Run(first=2 * s, last=2 * s + 1) for s, _ in CELLS]


def test_two_neighbours_in_one_domain_take_the_copy_of_one_of_them_along() -> None:
    racks = ("rack-1", "rack-1", "rack-2")
    seen = [covered(pod, stage, domain=racks[stage]) for stage, pod in enumerate(pipeline())]
    first, second, third = cover(PLACES, seen, LINEAGE, NUM_TYPES)
    assert (first.domains, second.domains, third.domains) == (("rack-1",), ("rack-1",), ())


def test_a_log_that_went_with_its_sender_uncovers_the_stages_beside_it() -> None:
    pods = pipeline()
    pods[1].logs.clear()
    seen = [covered(pod, stage) for stage, pod in enumerate(pods)]
    first, second, third = cover(PLACES, seen, LINEAGE, NUM_TYPES)
    assert (first.is_covered, second.is_covered, third.is_covered) == (False, True, False)
    assert first.why_not == "stage 0 lacks the input-gradient of stage 1, type 0, in step 2"
    assert first.pods == ("a",)


def test_a_log_of_a_refused_attempt_does_not_count() -> None:
    pods = pipeline()
    pods[1].logs = {(p, k, s, t, "q0-n" if s == 4 else q) for p, k, s, t, q in pods[1].logs}
    seen = [covered(pod, stage) for stage, pod in enumerate(pods)]
    first = cover(PLACES, seen, LINEAGE, NUM_TYPES)[0]
    assert not first.is_covered
    assert first.why_not.endswith("type 0, in step 4")


def test_with_one_replica_any_pods_may_be_lost_if_copies_of_states_are_left() -> None:
    """The rule of ``Auto``: the logs that go with a pod are of stages that are lost with it."""
    pods = pipeline()
    spare = Pod("spare", units={unit for pod in pods for unit in pod.units})
    for num_lost in range(1, NUM_STAGES):  # commits are where trainers are
        for lost in combinations(range(NUM_STAGES), num_lost):
            left = [spare, *(pod for stage, pod in enumerate(pods) if stage not in lost)]
            stores = BoundaryStores([pod.report() for pod in left], plan_of())
            for stage in lost:
                assert 6 in stores.reach(stage, lost), (stage, lost)


def test_with_two_replicas_a_masked_cell_takes_logs_along_that_nobody_writes_again() -> None:
    """Why ``Auto`` takes gradients there: each type is logged by the replica that computed it."""
    pods = {pod.name: pod for pod in pipeline()}
    twin = Pod("b2", records=dict(pods["b"].records), units=set(pods["b"].units))
    twin.logs = {log for log in pods["b"].logs if log[3] == 1}
    pods["b"].logs -= twin.logs

    def reaches_newest(*names: str) -> bool:
        left = [pod for pod in (*pods.values(), twin) if pod.name in names]
        return 6 in BoundaryStores([p.report() for p in left], plan_of()).reach(0, {0})

    assert reaches_newest("b", "b2", "c"), "one stage is lost"
    assert not reaches_newest("b", "c"), "after a cell that was masked"


def test_what_is_lacking_of_a_cell_is_named_with_its_inner_rank() -> None:
    pods = [Pod(name, records=dict.fromkeys(range(6), True)) for name in ("a", "b", "c")]
    for stage, pod in enumerate(pods):
        for position in (2 * stage, 2 * stage + 1):
            pod.units |= {(position, unit, SegmentKind.STATE, 3) for unit in (0, 1)}
            for kind in (SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT):
                pod.logs |= {(position, kind, s, t, COMMITTED) for s in range(6) for t in (0, 1)}
    seen = [covered(pod, 2 * stage, 2 * stage + 1) for stage, pod in enumerate(pods)]
    assert [(p.is_covered, p.num_copies) for p in cover(CELLS, seen, LINEAGE, NUM_TYPES)] == [
        (True, 1)
    ] * 6
    pods[1].units = {unit for unit in pods[1].units if unit[:2] != (3, 1)}
    pods[2].logs = {log for log in pods[2].logs if log[0] != 5}
    seen = [covered(pod, 2 * stage, 2 * stage + 1) for stage, pod in enumerate(pods)]
    coverage = cover(CELLS, seen, LINEAGE, NUM_TYPES)
    assert [p.is_covered for p in coverage] == [True, True, False, False, True, True]
    assert {p.why_not for p in coverage[2:4]} == {"no store holds unit 1 of stage 1, inner rank 1"}
