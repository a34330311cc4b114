"""Units: the parts of a block whose state is snapshotted, and whose weights can be frozen, alone.

In a layer with experts each expert is a unit, the router is one, and so is all the rest. A block
that names no units is one (Gandhi and Kozyrakis, "MoEvement", 2024, section 3.2, which calls a unit
an operator). A unit has whole parameters, so in a block's flat buffer it is a few slices.

Everything here is a pure function of names and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.snapshots.units import UnitKind

PROBABILITY = ".probability"
"""End of the name of a statistic: the sum of the probabilities that a gate gave to a unit, each of
them times 65,536 and rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some of a block's parameters."""

    name: str
    """Local to the block and unique in it, e.g. "experts.3"."""
    parameters: tuple[str, ...]
    """Local names, e.g. "mixture.experts.3.down.weight"."""
    kind: UnitKind = UnitKind.REST
    """Its part in the block. What is counted is an expert, whatever stands here: ``statistics`` has
    its name."""
    capacity: int = 0
    """The most tokens that it can take in a step, for ``snapshots.ordering: CapacityAware``; 0: it
    does not say."""


def tile(
    block: str, units: Sequence[Unit], parameters: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each unit of a block, all by their model-wide names.

    Args:
        block: its name.
        units: as the block names them; none: the block is one unit, which has its name.
        parameters: local names of all its parameters.

    Raises:
        InvalidSpecError: two units have one name, or a parameter is unknown, in two units or in
            none.
    """
    if not units:
        return {block: tuple(f"{block}.{local}" for local in parameters)}
    names = [unit.name for unit in units]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _refused(block, f"names the units {twice} twice; give each a name of its own")
    owners: dict[str, str] = {}
    for unit in units:
        for local in unit.parameters:
            if local not in parameters:
                raise _refused(block, f"has no parameter {local!r}, which unit {unit.name!r} names")
            if local in owners:
                raise _refused(
                    block,
                    f"has parameter {local!r} in the units {owners[local]!r} and {unit.name!r}; a "
                    "parameter belongs to one",
                )
            owners[local] = unit.name
    for local in parameters:
        if local not in owners:
            raise _refused(block, f"has parameter {local!r} in no unit; name it in one")
    return {
        f"{block}.{unit.name}": tuple(f"{block}.{local}" for local in unit.parameters)
        for unit in units
    }


def popularity(
    block: str, units: Sequence[Unit], counted: Sequence[str], counts: Sequence[int]
) -> dict[str, int]:
    """Return how many tokens each unit of a block had, by the unit's model-wide name.

    Units that nobody counts, such as the router, are not in it: every token takes them.

    Args:
        block: its name.
        units: of the block.
        counted: what its statistics count: local names of units, or other things.
        counts: the block's statistics of a step.
    """
    names = {unit.name for unit in units}
    return {
        f"{block}.{name}": count
        for name, count in zip(counted, counts, strict=True)
        if name in names
    }


def _refused(block: str, problem: str) -> InvalidSpecError:
    return InvalidSpecError("workload", f"block {block!r} {problem}")
