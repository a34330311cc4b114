"""Boundary replays: a conversion makes every unit active, with logs of each type of each step."""

from __future__ import annotations

import random

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import PodUid
from mainstay_core.snapshots.boundary_replay import BoundaryReplay, plan_boundary_replay
from mainstay_core.snapshots.inventory import (
    Direction,
    HeldBoundary,
    HeldUnit,
    Lack,
    NoReplay,
    Store,
)
from mainstay_core.snapshots.prices import UnitPrice
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.units import Position
from mainstay_core.snapshots.windows import Window, plan_instalments

NUM_TYPES = 4


def place(stage: int) -> Position:
    return Position(stage=stage)


def copies_of(stage: int, window: Window, num_units: int) -> tuple[HeldUnit, ...]:
    """Copies of a stage's units as the instalments of a window make them."""
    order = [
        UnitPrice(name=f"s{stage}.u{number}", full_bytes=12, compute_bytes=2)
        for number in range(num_units)
    ]
    instalments = plan_instalments(order, window.length)
    return tuple(
        HeldUnit(
            position=place(stage),
            unit=price.name,
            full=tuple(window.version_of(i.number) for i in instalments if price.name in i.full),
            compute=tuple(
                window.version_of(i.number) for i in instalments if price.name in i.compute
            ),
        )
        for price in order
    )


def boundary(
    stage: int, direction: Direction, steps: range, first: int = 0, stop: int = NUM_TYPES
) -> HeldBoundary:
    return HeldBoundary(
        sender=place(stage),
        direction=direction,
        first_type=first,
        stop_type=stop,
        first_step=steps.start,
        stop_step=steps.stop,
    )


def store(
    name: str,
    units: tuple[HeldUnit, ...] = (),
    boundaries: tuple[HeldBoundary, ...] = (),
    *,
    living: bool = True,
) -> Store:
    return Store(
        pod=PodUid(name),
        domain=f"rack-{name}",
        living=living,
        units=units,
        boundaries=boundaries,
    )


def planned(answer: BoundaryReplay | NoReplay) -> BoundaryReplay:
    assert isinstance(answer, BoundaryReplay), answer
    return answer


def names_of(copies: tuple[HeldUnit, ...]) -> list[str]:
    return [copy.unit for copy in copies]


WINDOW = Window(first=10, length=3)
COPIES = copies_of(1, WINDOW, 6)
LOGS = (
    boundary(0, Direction.ACTIVATION, range(10, 14)),
    boundary(2, Direction.GRADIENT, range(10, 14)),
)


def replay(stores: list[Store], version: int = 13) -> BoundaryReplay | NoReplay:
    return plan_boundary_replay(
        Stretch(first=1, last=1),
        {place(1): names_of(COPIES)},
        stores,
        WINDOW,
        version,
        num_stages=3,
        num_types=NUM_TYPES,
    )


def test_the_papers_conversion_of_three_instalments() -> None:
    """MoEvement, figure 8: two units become active with each of the instalments 10, 11 and 12."""
    plan = planned(replay([store("a", COPIES, LOGS)]))

    names = names_of(COPIES)
    assert [(one.step, one.units) for one in plan.frozen] == [
        (10, tuple(names[2:])),
        (11, tuple(names[4:])),
    ]
    full = {load.unit: load.version for load in plan.loads if load.full}
    assert full == dict(zip(names, [10, 10, 11, 11, 12, 12], strict=True))
    assert [(load.version, load.unit) for load in plan.loads if not load.full] == [
        *((10, name) for name in names[2:]),
        *((11, name) for name in names[4:]),
    ]
    assert plan.num_steps == 3
    assert plan.reason == (
        "stage 1: 3 steps again from version 10, of which 2 until all units are active"
    )


def test_the_conversion_alone_takes_one_step_less_than_the_window() -> None:
    plan = planned(replay([store("a", COPIES, LOGS)], version=WINDOW.last))

    assert plan.num_steps == WINDOW.length - 1
    assert {load.unit for load in plan.loads if load.full} == set(names_of(COPIES))


def test_both_neighbours_send_their_logs_and_equal_steps_are_one_fetch() -> None:
    halves = (
        boundary(0, Direction.ACTIVATION, range(10, 13), 0, 3),
        boundary(0, Direction.ACTIVATION, range(10, 12), 2, 4),
    )
    rest = (boundary(0, Direction.ACTIVATION, range(12, 14), 3, 4), LOGS[1])

    plan = planned(replay([store("a", COPIES, halves), store("b", (), rest)]))

    assert [
        (f.direction.value, f.first_step, f.stop_step, f.first_type, f.stop_type, f.source)
        for f in plan.boundaries
    ] == [
        ("activation", 10, 12, 0, 3, "a"),
        ("activation", 10, 12, 3, 4, "a"),
        ("activation", 12, 13, 0, 3, "a"),
        ("activation", 12, 13, 3, 4, "b"),
        ("gradient", 10, 13, 0, 4, "b"),
    ]


def test_the_ends_of_the_pipeline_have_no_neighbour_to_ask() -> None:
    copies = {stage: copies_of(stage, WINDOW, 2) for stage in (0, 1)}

    plan = planned(
        plan_boundary_replay(
            Stretch(first=0, last=1),
            {place(stage): names_of(held) for stage, held in copies.items()},
            [store("a", (*copies[0], *copies[1]))],
            WINDOW,
            15,
            num_stages=2,
            num_types=NUM_TYPES,
        )
    )

    assert plan.boundaries == ()
    assert plan.num_steps == 2 * WINDOW.length - 1


def test_what_is_lacking_is_named() -> None:
    dead_copies = store("b", COPIES, living=False)
    dead_logs = store("c", (), LOGS, living=False)

    no_state = replay([dead_copies, store("a", (), LOGS)])
    no_log = replay([store("a", COPIES), dead_logs])
    too_early = replay([store("a", COPIES, LOGS)], version=11)
    bare = tuple(
        HeldUnit(position=copy.position, unit=copy.unit, full=copy.full) for copy in COPIES
    )
    no_weights = replay([store("a", bare, LOGS), dead_copies])

    assert isinstance(no_state, NoReplay)
    assert (no_state.lack, no_state.unit, no_state.domains) == (
        Lack.FULL_STATE,
        "s1.u0",
        ("rack-b",),
    )
    assert isinstance(no_log, NoReplay)
    assert (no_log.lack, no_log.version, no_log.domains) == (Lack.BOUNDARY_LOG, 10, ("rack-c",))
    assert no_log.reason == (
        "stage 1 lacks its activations of shard type 0 in step 10 from stage 0: its copies were in "
        "rack-c"
    )
    assert isinstance(too_early, NoReplay)
    assert too_early.lack is Lack.WINDOW
    assert isinstance(no_weights, NoReplay)
    assert (no_weights.lack, no_weights.unit, no_weights.version) == (
        Lack.COMPUTE_WEIGHTS,
        "s1.u2",
        10,
    )


def check_conversion(plan: BoundaryReplay, units: dict[Position, list[str]]) -> None:
    """Play the replay: each unit is active at the step's version, or frozen with its weights."""
    active: dict[tuple[Position, str], int] = {}
    for version in range(plan.window.first, plan.version + 1):
        loads = [load for load in plan.loads if load.version == version]
        weights = {(load.position, load.unit) for load in loads if not load.full}
        for load in loads:
            assert (load.position, load.unit) not in active
            if load.full:
                active[load.position, load.unit] = version
        if version == plan.version:
            break
        frozen = {
            (one.position, name) for one in plan.frozen if one.step == version for name in one.units
        }
        everything = {(position, name) for position, names in units.items() for name in names}
        assert frozen == weights == everything - active.keys()
        active = {key: at + 1 for key, at in active.items()}
    assert active == dict.fromkeys(
        ((position, name) for position, names in units.items() for name in names), plan.version
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_exists_exactly_if_living_stores_have_all_of_it(seed: int) -> None:
    rng = random.Random(seed)
    num_plans = 0
    for _ in range(150):
        num_stages = rng.randint(1, 4)
        first = rng.randrange(num_stages)
        stretch = Stretch(first=first, last=rng.randrange(first, num_stages))
        window = Window(first=rng.randint(0, 5), length=rng.randint(1, 4))
        version = rng.randint(window.last, window.last + window.length)
        copies = {stage: copies_of(stage, window, rng.randint(1, 5)) for stage in stretch.stages}
        stores = []
        for name in "abc":
            held = [copy for stage in copies.values() for copy in stage if rng.random() < 0.8]
            logs = []
            for stage, direction in ((first - 1, "activation"), (stretch.last + 1, "gradient")):
                for _ in range(rng.randint(0, 3)):
                    start = rng.randint(0, 2)
                    steps = range(window.first + rng.randint(0, 1), version + rng.randint(-1, 2))
                    stop = rng.randint(start + 1, NUM_TYPES)
                    if 0 <= stage < num_stages:
                        logs.append(boundary(stage, Direction(direction), steps, start, stop))
            stores.append(store(name, tuple(held), tuple(logs), living=rng.random() < 0.9))
        units = {place(stage): names_of(held) for stage, held in copies.items()}
        answer = plan_boundary_replay(
            stretch,
            units,
            stores,
            window,
            version,
            num_stages=num_stages,
            num_types=NUM_TYPES,
        )
        alive = [one for one in stores if one.living]
        has_units = all(
            any(copy in one.units for one in alive) for held in copies.values() for copy in held
        )
        borders = [(first - 1, "activation")] * (first > 0) + [(stretch.last + 1, "gradient")] * (
            stretch.last < num_stages - 1
        )
        has_logs = all(
            any(covers(log, stage, direction, step, t) for one in alive for log in one.boundaries)
            for stage, direction in borders
            for step in range(window.first, version)
            for t in range(NUM_TYPES)
        )
        assert isinstance(answer, BoundaryReplay) == (has_units and has_logs)
        if isinstance(answer, NoReplay):
            continue
        num_plans += 1
        check_conversion(answer, units)
        assert window.length - 1 <= answer.num_steps <= 2 * window.length - 1
        by_pod = {one.pod: one for one in alive}
        for stage, direction in borders:
            for step in range(window.first, version):
                got = [
                    t
                    for f in answer.boundaries
                    if (f.sender.stage, f.direction) == (stage, direction)
                    and f.first_step <= step < f.stop_step
                    for t in range(f.first_type, f.stop_type)
                    if any(
                        covers(log, stage, direction, step, t)
                        for log in by_pod[f.source].boundaries
                    )
                ]
                assert sorted(set(got)) == list(range(NUM_TYPES))
    assert num_plans > 10


def covers(log: HeldBoundary, stage: int, direction: str, step: int, shard_type: int) -> bool:
    return (
        (log.sender.stage, log.direction) == (stage, direction)
        and log.first_step <= step < log.stop_step
        and log.first_type <= shard_type < log.stop_type
    )


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match=r"stretch: is stages 1 to 3, must be within 0\.\.2"):
        plan_boundary_replay(
            Stretch(first=1, last=3), {}, [], WINDOW, 12, num_stages=3, num_types=1
        )
    with pytest.raises(InvalidSpecError, match="units: must be those of all positions of stage 1"):
        plan_boundary_replay(
            Stretch(first=1, last=1), {}, [], WINDOW, 12, num_stages=3, num_types=1
        )
