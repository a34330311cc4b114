"""Ways of micro-batches through a stage, and the order of what a stage does of one of them."""

from __future__ import annotations

from itertools import product

import pytest

from mainstay_core.base.shape import Order
from mainstay_core.planning.routes import Extent, blocks_of, name_of, route_of, ways_of


@pytest.mark.parametrize("num_stages", range(2, 6))
def test_swapped_each_end_has_two_ways_and_all_others_one(num_stages: int) -> None:
    ways = [ways_of(Order.SWAPPED, stage, num_stages) for stage in range(num_stages)]

    assert [name_of(way) for way in ways[0]] == ["whole", "embedding-layers"]
    assert [name_of(way) for way in ways[-1]] == ["whole", "layers-head"]
    assert all(of == ((Extent.WHOLE,),) for of in ways[1:-1])
    for number, stage in product(range(8), range(num_stages)):
        route = route_of(Order.SWAPPED, number, num_stages)
        assert tuple(visit.extent for visit in route if visit.stage == stage) in ways[stage]


def test_in_order_a_stage_has_one_way() -> None:
    assert ways_of(Order.IN_ORDER, 0, 1) == ways_of(Order.IN_ORDER, 2, 3) == ((Extent.WHOLE,),)


def test_the_visits_of_a_way_lead_through_each_block_once() -> None:
    for num_stages, num_blocks in product(range(2, 5), range(2, 5)):
        for stage in range(num_stages):
            ends = {"is_first": stage == 0, "is_last": stage == num_stages - 1}
            for way in ways_of(Order.SWAPPED, stage, num_stages):
                led = [n for extent in way for n in blocks_of(extent, num_blocks, **ends)]
                assert led == [*range(num_blocks)]
