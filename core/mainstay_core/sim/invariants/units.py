"""The units of a simulated job: names, sizes, keys, and which are counted as experts."""

from __future__ import annotations

from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.sim import terms
from mainstay_core.sim.scenarios.scenario import Scenario
from mainstay_core.snapshots.job_units import Expert, JobUnits
from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind
from mainstay_core.wire.segments import SegmentHeader, SegmentKey, SegmentKind

COUNTED = len(terms.counted(0, 0, 0))
"""Units of a position that are counted: as many as a stage counts integers."""


def job_units(scenario: Scenario) -> JobUnits:
    """Return the units of all positions. Of each stage the first two are counted as experts."""
    shape = scenario.config.shape
    positions, experts = [], []
    for number, (stage, inner) in enumerate(shape.positions):
        units = []
        for unit in range(scenario.num_units(number)):
            name, place = f"{number}.{unit}", 2 * stage + unit
            units.append(
                Unit(
                    name=name,
                    kind=UnitKind.EXPERT if unit < COUNTED else UnitKind.REST,
                    position=Position(stage=stage, inner=inner),
                    block=str(stage),
                    block_index=0,
                    spans=(Span(start=0, stop=size_of(unit, SegmentKind.STATE) // 3),),
                )
            )
            if unit < COUNTED:
                experts.append(
                    Expert(
                        unit=name,
                        layer=stage,
                        tokens=place,
                        probabilities=place,
                        capacity=1 + unit,
                    )
                )
        positions.append(tuple(units))
    # Three bytes of each element, as of a master and two moments, make a unit's bytes.
    types = StateTypes(compute_bytes=1, master_bytes=1, optimizer_bytes=(1, 1))
    return JobUnits(positions=tuple(positions), types=types, experts=tuple(experts))


def unit_number(name: str) -> int:
    """Return a unit's place in its position's canonical order."""
    return int(name.rpartition(".")[2])


def size_of(unit: int, kind: SegmentKind) -> int:
    """Return the bytes of a unit's segment: each unit has more than the one before."""
    return (unit + 1) * PAGE_BYTES * (2 if kind is SegmentKind.STATE else 1)


def key_of(lineage: int, position: int, unit: int, kind: SegmentKind, version: int) -> SegmentKey:
    """Return the key of a segment."""
    return SegmentKey(lineage=lineage, position=position, unit=unit, kind=kind, version=version)


def is_whole(header: SegmentHeader, content: terms.UnitTerm) -> bool:
    """Return whether bytes have the digest with which they were written."""
    return header.digest == terms.term("bytes", content)
