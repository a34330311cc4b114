"""Computes the bytes of a unit's copy from the types of its state.

The full state of a unit is its masters and the optimizer's moments; its compute weights are what
forward and backward read (MoEvement, section 3.2: 12 and 2 bytes per parameter for AdamW with
masters in fp32 and weights in fp16). Nothing here knows a type: other precisions (section 5.7,
table 7) are other arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Count, Longest, Name, Range
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.units import Unit

ElementBytes = Annotated[int, Range(0, 64)]
"""Bytes of one element of a tensor; 0 if there is no such tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTypes:
    """Bytes per element of the tensors that a state consists of."""

    compute_bytes: ElementBytes
    """What forward and backward read. Where they read the masters it is the masters' width."""
    master_bytes: ElementBytes
    optimizer_bytes: Annotated[tuple[ElementBytes, ...], Longest(16)]
    """One for each moment, e.g. (4, 4) for AdamW in fp32."""

    @property
    def full_bytes(self) -> int:
        """Bytes per element of the state that an apply reads and writes."""
        return self.master_bytes + sum(self.optimizer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPrice:
    """The bytes of a unit's copies.

    Invariant: compute weights take no more than the full state, from which they can be made.
    """

    name: Name
    full_bytes: Count
    compute_bytes: Count

    def __post_init__(self) -> None:
        if not 0 <= self.compute_bytes <= self.full_bytes:
            raise InvalidSpecError(
                self.name,
                f"has compute weights of {self.compute_bytes} bytes, must be at most "
                f"{self.full_bytes}, as its full state has",
            )


def price_units(
    units: Iterable[Unit], types: StateTypes, *, with_compute: bool
) -> tuple[UnitPrice, ...]:
    """Return what copies of units take, in their order.

    Args:
        units: of one position.
        types: of their state.
        with_compute: whether compute weights are copied of units whose turn is still to come.
            Boundary replay needs them; a replay of gradients does not.
    """
    compute = min(types.compute_bytes, types.full_bytes) if with_compute else 0
    return tuple(
        UnitPrice(
            name=unit.name,
            full_bytes=unit.num_elements * types.full_bytes,
            compute_bytes=unit.num_elements * compute,
        )
        for unit in units
    )
