"""Replays of gradients: each unit gets every step's whole gradient, or what lacks is named."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.job.reduction_sizes import CHUNK
from mainstay_core.snapshots.duties import Author, ChunkShare
from mainstay_core.snapshots.gradient_replay import (
    GradientReplay,
    chunks_of,
    plan_gradient_replay,
)
from mainstay_core.snapshots.inventory import HeldLog, HeldUnit, Lack, NoReplay, Store
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind

HERE = Position(stage=1)


def unit(name: str, block: int, *spans: tuple[int, int]) -> Unit:
    """A unit with spans in chunks of its block."""
    return Unit(
        name=name,
        kind=UnitKind.EXPERT,
        position=HERE,
        block=f"b{block}",
        block_index=block,
        spans=tuple(Span(start=a * CHUNK, stop=b * CHUNK) for a, b in spans),
    )


def joiner(name: str) -> Author:
    return Author(slot=Slot(pod=PodUid(name), index=0), incarnation=Incarnation("new"))


def store(
    name: str,
    units: Mapping[str, tuple[int, ...]],
    logs: list[tuple[int, int, int, int]],
    *,
    living: bool = True,
) -> Store:
    """A store with versions of units, and logs as (share, of, first, stop)."""
    return Store(
        pod=PodUid(name),
        domain=f"rack-{name}",
        living=living,
        units=tuple(HeldUnit(position=HERE, unit=u, full=v) for u, v in units.items()),
        logs=tuple(
            HeldLog(
                position=HERE,
                share=ChunkShare(index=share, of=of),
                first_step=first,
                stop_step=stop,
            )
            for share, of, first, stop in logs
        ),
    )


UNITS = [unit("u", 0, (0, 2)), unit("v", 0, (2, 3)), unit("w", 1, (0, 1))]


def planned(answer: GradientReplay | NoReplay) -> GradientReplay:
    assert isinstance(answer, GradientReplay), answer
    return answer


def test_chunks_are_counted_over_the_blocks_of_the_position() -> None:
    assert chunks_of(UNITS) == {"u": {0, 1}, "v": {2}, "w": {3}}
    half = [unit("u", 0, (0, 1)), unit("w", 2, (0, 1))]
    short = Unit(
        name="v",
        kind=UnitKind.REST,
        position=HERE,
        block="b0",
        block_index=0,
        spans=(Span(start=CHUNK, stop=CHUNK + 32),),
    )
    assert chunks_of([*half, short]) == {"u": {0}, "v": {1}, "w": {2}}


def test_each_unit_starts_from_its_own_newest_copy() -> None:
    stores = [
        store("a", {"u": (4, 7), "v": (5,), "w": (6,)}, [(0, 1, 4, 9)]),
        store("b", {"u": (7,), "v": (8,), "w": (6,)}, [(0, 1, 4, 9)]),
    ]

    plan = planned(plan_gradient_replay(UNITS, stores, 9, [joiner("x")]))

    assert {one.unit: (one.from_version, one.source) for one in plan.units} == {
        "u": (7, "a"),
        "v": (8, "b"),
        "w": (6, "a"),
    }
    assert plan.num_steps == 3
    assert plan.reason == (
        "stage 1: 3 units from their newest copies, with the logged gradients of 3 steps up to "
        "version 9, by 1 joiner"
    )
    (u,) = [one for one in plan.units if one.unit == "u"]
    assert [(log.first_step, log.stop_step) for log in u.logs] == [(7, 9)]


def test_a_copy_of_the_needed_version_needs_no_log() -> None:
    stores = [store("a", {"u": (9,), "v": (9,), "w": (9, 10)}, [])]

    plan = planned(plan_gradient_replay(UNITS, stores, 9, [joiner("x")]))

    assert plan.num_steps == 0
    assert all(not one.logs for one in plan.units)


def test_a_share_that_no_chunk_of_the_unit_is_in_is_not_needed() -> None:
    stores = [store("a", {"u": (1,), "v": (1,), "w": (1,)}, [(0, 4, 1, 2), (1, 4, 1, 2)])]

    only_u = plan_gradient_replay([UNITS[0]], stores, 2, [joiner("x")])
    assert {log.share.index for log in planned(only_u).units[0].logs} == {0, 1}
    lack = plan_gradient_replay(UNITS, stores, 2, [joiner("x")])
    assert isinstance(lack, NoReplay)
    assert (lack.lack, lack.unit, lack.version) == (Lack.GRADIENT_LOG, "v", 1)


def test_what_only_lost_stores_held_is_named_with_unit_version_and_domains() -> None:
    stores = [
        store("a", {"u": (4,), "v": (5,)}, [(0, 1, 4, 6)]),
        store("b", {"v": (6,), "w": (6,)}, [], living=False),
        store("c", {"w": (6,)}, [(0, 1, 4, 8)], living=False),
    ]

    no_copy = plan_gradient_replay([UNITS[2]], stores, 8, [joiner("x")])
    no_log = plan_gradient_replay([UNITS[0]], stores, 8, [joiner("x")])
    never = plan_gradient_replay([UNITS[0]], stores[1:], 8, [joiner("x")])

    assert isinstance(no_copy, NoReplay)
    assert (no_copy.lack, no_copy.unit, no_copy.version) == (Lack.FULL_STATE, "w", 6)
    assert no_copy.domains == ("rack-b", "rack-c")
    assert no_copy.reason == (
        "stage 1: w lacks its full state of version 6: its copies were in rack-b, rack-c"
    )
    assert isinstance(no_log, NoReplay)
    assert (no_log.lack, no_log.version) == (Lack.GRADIENT_LOG, 6)
    assert no_log.reason == ("stage 1: u lacks its gradient of step 6: its copies were in rack-c")
    assert isinstance(never, NoReplay)
    assert never.reason == (
        "stage 1: u lacks its full state up to version 8: no store is known to have it"
    )


def test_several_joiners_share_the_units_and_use_their_own_stores() -> None:
    units = [unit(f"u{n}", n, (0, 1)) for n in range(6)]
    held = {one.name: (1,) for one in units}
    stores = [store(name, held, [(0, 1, 1, 4)]) for name in "abc"]

    plan = planned(plan_gradient_replay(units, stores, 4, [joiner("b"), joiner("z")]))

    by_joiner: dict[str, list[str]] = {}
    for one in plan.units:
        by_joiner.setdefault(one.joiner.slot.pod, []).append(one.source)
    assert by_joiner["b"] == ["b"] * 3
    assert sorted(by_joiner["z"]) == ["a", "c", "c"] or sorted(by_joiner["z"]) == ["a", "a", "c"]


def whole_steps(stores: list[Store], chunks: frozenset[int], step: int) -> bool:
    """Whether some division of a step's gradient has every chunk in a living store."""
    divisions = {log.share.of for one in stores for log in one.logs}
    return any(
        all(
            any(
                one.living
                and log.share == ChunkShare(index=chunk % of, of=of)
                and log.first_step <= step < log.stop_step
                for one in stores
                for log in one.logs
            )
            for chunk in chunks
        )
        for of in divisions
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_exists_exactly_if_each_unit_has_a_copy_and_all_gradients_since(seed: int) -> None:
    rng = random.Random(seed)
    num_plans = 0
    for _ in range(250):
        stores = [
            store(
                name,
                {u.name: tuple(sorted(rng.sample(range(6), 2))) for u in UNITS},
                [
                    (rng.randrange(of), of, first, rng.randint(first, 6))
                    for of in rng.choices((1, 2), k=rng.randint(0, 4))
                    for first in [rng.randint(0, 3)]
                ],
                living=rng.random() < 0.8,
            )
            for name in "abc"
        ]
        version = rng.randint(1, 6)
        joiners = [joiner(name) for name in "ax"[: rng.randint(1, 2)]]
        answer = plan_gradient_replay(UNITS, stores, version, joiners)
        chunks = chunks_of(UNITS)
        starts = {
            u.name: [
                copied
                for one in stores
                if one.living
                for copy in one.units
                if copy.unit == u.name
                for copied in copy.full
                if copied <= version
                and all(whole_steps(stores, chunks[u.name], s) for s in range(copied, version))
            ]
            for u in UNITS
        }
        if not all(starts.values()):
            assert isinstance(answer, NoReplay)
            assert not starts[answer.unit]
            continue
        num_plans += 1
        plan = planned(answer)
        by_pod = {one.pod: one for one in stores}
        assert [one.unit for one in plan.units] == [u.name for u in UNITS]
        for one in plan.units:
            assert one.from_version == max(starts[one.unit])
            assert by_pod[one.source].living
            for step in range(one.from_version, version):
                shares = [f for f in one.logs if f.first_step <= step < f.stop_step]
                (of,) = {fetch.share.of for fetch in shares}
                wanted = {chunk % of for chunk in chunks[one.unit]}
                assert sorted(fetch.share.index for fetch in shares) == sorted(wanted)
                for fetch in shares:
                    assert by_pod[fetch.source].living
                    assert any(
                        log.share == fetch.share and log.first_step <= step < log.stop_step
                        for log in by_pod[fetch.source].logs
                    )
            assert all(f.first_step >= one.from_version for f in one.logs)
            assert all(f.stop_step <= version for f in one.logs)
    assert num_plans > 20


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match="joiners: has none"):
        plan_gradient_replay(UNITS, [], 1, [])
    with pytest.raises(InvalidSpecError, match="units: are of 0 positions"):
        plan_gradient_replay([], [], 1, [joiner("x")])
