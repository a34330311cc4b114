"""Bytes of a copy follow from the types of the state, whatever they are."""

from __future__ import annotations

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.prices import StateTypes, UnitPrice, price_units
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind

UNITS = (
    Unit(
        name="b",
        kind=UnitKind.LAYER,
        position=Position(stage=0),
        block="b",
        block_index=0,
        spans=(Span(start=0, stop=64),),
    ),
)


@pytest.mark.parametrize(
    ("types", "full", "compute"),
    [
        # MoEvement, section 3.2, and the five rows of its table 7.
        (StateTypes(compute_bytes=2, master_bytes=4, optimizer_bytes=(4, 4)), 12, 2),
        (StateTypes(compute_bytes=2, master_bytes=2, optimizer_bytes=(2, 2)), 6, 2),
        (StateTypes(compute_bytes=1, master_bytes=4, optimizer_bytes=(4, 4)), 12, 1),
        (StateTypes(compute_bytes=1, master_bytes=2, optimizer_bytes=(4, 4)), 10, 1),
        (StateTypes(compute_bytes=1, master_bytes=2, optimizer_bytes=(1, 2)), 5, 1),
        (StateTypes(compute_bytes=1, master_bytes=1, optimizer_bytes=(1, 2)), 4, 1),
        # Compute weights can be made from masters that are narrower.
        (StateTypes(compute_bytes=2, master_bytes=1, optimizer_bytes=()), 1, 1),
    ],
)
def test_a_copy_takes_the_bytes_of_its_types(types: StateTypes, full: int, compute: int) -> None:
    (price,) = price_units(UNITS, types, with_compute=True)

    assert price == UnitPrice(name="b", full_bytes=64 * full, compute_bytes=64 * compute)


def test_a_replay_of_gradients_needs_no_compute_weights() -> None:
    types = StateTypes(compute_bytes=2, master_bytes=4, optimizer_bytes=(4, 4))

    assert price_units(UNITS, types, with_compute=False)[0].compute_bytes == 0


def test_compute_weights_larger_than_the_state_they_come_from_are_refused() -> None:
    with pytest.raises(InvalidSpecError, match="must be at most 1"):
        UnitPrice(name="u", full_bytes=1, compute_bytes=2)
