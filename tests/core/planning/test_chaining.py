"""Chaining: equal to a brute force on thousands of small cases, and the figure it is for."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from mainstay_core.base.errors import InfeasiblePlanError, InvalidSpecError
from mainstay_core.planning.chaining import Cell, plan_chaining

Living = list[list[Cell]]
Previous = dict[int, tuple[str, ...]]


def links_of(chains: Previous) -> set[tuple[str, str]]:
    return {link for cells in chains.values() for link in itertools.pairwise(cells)}


def intact_of(living: Living, previous: Previous) -> list[int]:
    ids = [{cell.cell_id for cell in cells} for cells in living]
    return [r for r in sorted(previous) if all(c in ids[s] for s, c in enumerate(previous[r]))]


def best_by_brute_force(living: Living, num_whole: int, previous: Previous) -> tuple[int, int]:
    """The fewest changed links, and among those the fewest across domains.

    Stage by stage over all ordered choices of cells; the second figure is only
    comparable if no chain is whole, since whole ones stay whatever their domains.
    """
    links = links_of(previous)
    best = dict.fromkeys(itertools.combinations(living[0], num_whole), (0, 0))
    for cells in living[1:]:
        longer: dict[tuple[Cell, ...], tuple[int, int]] = {}
        for order in itertools.permutations(cells, num_whole):
            longer[order] = min(
                (
                    changed + sum((a.cell_id, b.cell_id) not in links for a, b in pairs),
                    across + sum(a.domain != b.domain for a, b in pairs),
                )
                for last, (changed, across) in best.items()
                for pairs in [list(zip(last, order, strict=True))]
            )
        best = longer
    return min(best.values())


def small_case(rng: random.Random) -> tuple[Living, int, Previous]:
    stages, lanes = rng.randint(1, 3), rng.randint(2, 4)
    previous = {
        replica: tuple(f"{replica}.{stage}" for stage in range(stages))
        for replica in range(lanes)
        if rng.random() < 0.85
    }
    living = []
    for stage in range(stages):
        cells = [
            Cell(cell_id=f"{r}.{stage}", domain=rng.choice("abc"), replica=r)
            for r in range(lanes)
            if rng.random() < 0.8
        ]
        if not cells or rng.random() < 0.2:
            cells.append(Cell(cell_id=f"new.{stage}", domain=rng.choice("abc")))
        rng.shuffle(cells)
        living.append(cells)
    return living, lanes, previous


@pytest.mark.parametrize("seed", range(10))
def test_plan_is_as_good_as_the_best_of_all_chainings(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        living, lanes, previous = small_case(rng)
        wanted = rng.randint(1, lanes)
        plan = plan_chaining(living, lanes, wanted, previous)
        num_whole = min(wanted, *(len(cells) for cells in living))
        ids = [[cell.cell_id for cell in cells] for cells in living]
        domains = {cell.cell_id: cell.domain for cells in living for cell in cells}
        assert len(plan.chains) == num_whole
        assert all(0 <= replica < lanes for replica in plan.chains)
        for stage, stage_ids in enumerate(ids):
            chained = [cells[stage] for cells in plan.chains.values()]
            assert sorted([*chained, *plan.followers[stage]]) == sorted(stage_ids)
        best = best_by_brute_force(living, num_whole, previous)
        links = links_of(plan.chains)
        assert plan.links_changed == len(links - links_of(previous)) == best[0]
        intact = intact_of(living, previous)
        for replica in intact[:num_whole]:
            assert plan.chains[replica] == previous[replica]
        if not intact:
            assert sum(domains[a] != domains[b] for a, b in links) == best[1]


def test_order_of_the_cells_does_not_matter() -> None:
    rng = random.Random(5)
    for _ in range(200):
        living, lanes, previous = small_case(rng)
        shuffled = [rng.sample(cells, len(cells)) for cells in living]
        assert plan_chaining(living, lanes, lanes, previous) == plan_chaining(
            shuffled, lanes, lanes, previous
        )


def test_remains_of_two_broken_chains_make_a_whole_one() -> None:
    previous = {r: tuple(f"{r}.{s}" for s in range(3)) for r in range(3)}
    lost = {"0.2", "1.0"}
    living = [
        [
            Cell(cell_id=f"{r}.{s}", domain=f"pod{r}", replica=r)
            for r in range(3)
            if f"{r}.{s}" not in lost
        ]
        for s in range(3)
    ]
    plan = plan_chaining(living, 3, 3, previous)
    assert plan.chains[2] == previous[2]
    assert plan.links_changed == 1
    mated = next(cells for replica, cells in plan.chains.items() if replica != 2)
    assert mated in {("0.0", "0.1", "1.2"), ("0.0", "1.1", "1.2")}
    assert plan.reason == (
        "whole: 2 of 3 replicas, as stage 0 has 2 living cells; 1 link changed, 1 follower"
    )


def test_a_follower_fills_a_gap_next_to_its_own_domain() -> None:
    previous = {0: ("a0", "a1"), 1: ("b0", "b1")}
    living = [
        [Cell(cell_id="a0", domain="x", replica=0), Cell(cell_id="b0", domain="y", replica=1)],
        [Cell(cell_id="f1", domain="x"), Cell(cell_id="g1", domain="y")],
    ]
    plan = plan_chaining(living, 2, 2, previous)
    assert plan.chains == {0: ("a0", "f1"), 1: ("b0", "g1")}


def test_a_new_job_chains_cells_of_one_domain() -> None:
    living = [[Cell(cell_id=f"p{p}/{s}", domain=f"p{p}") for p in range(4)] for s in range(2)]
    plan = plan_chaining(living, 8, 8)
    assert plan.chains == {p: (f"p{p}/0", f"p{p}/1") for p in range(4)}
    assert plan.followers == ((), ())


def test_16_lost_cells_of_64_by_16_leave_61_whole_replicas_and_not_50() -> None:
    rng = random.Random(1)
    previous = {r: tuple(f"{r:02}.{s:02}" for s in range(16)) for r in range(64)}
    whole, without = [], []
    for _ in range(60):
        lost = set(rng.sample([cell for cells in previous.values() for cell in cells], 16))
        living = [
            [
                Cell(cell_id=cells[s], domain=f"rack{r // 8}", replica=r)
                for r, cells in previous.items()
                if cells[s] not in lost
            ]
            for s in range(16)
        ]
        plan = plan_chaining(living, 64, 64, previous)
        intact = intact_of(living, previous)
        assert all(plan.chains[replica] == previous[replica] for replica in intact)
        whole.append(len(plan.chains))
        without.append(len(intact))
    assert statistics.mean(whole) == pytest.approx(60.9, abs=0.4)
    assert statistics.mean(without) == pytest.approx(49.6, abs=0.6)


def test_a_stage_without_cells_leaves_no_replica_whole() -> None:
    with pytest.raises(InfeasiblePlanError, match="stage 1 has no living cell"):
        plan_chaining([[Cell(cell_id="a")], []], 1, 1)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidSpecError, match="replicas_wanted"):
        plan_chaining([[Cell(cell_id="a")]], 1, 2)
    with pytest.raises(InvalidSpecError, match="cell a twice"):
        plan_chaining([[Cell(cell_id="a")], [Cell(cell_id="a")]], 1, 1)
    with pytest.raises(InvalidSpecError, match="previous"):
        plan_chaining([[Cell(cell_id="a")]], 1, 1, {0: ("a", "b")})
    with pytest.raises(InvalidSpecError, match="no stage"):
        plan_chaining([], 1, 1)
