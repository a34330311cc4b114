"""The units of all positions of a job, of shapes alone: every trainer plans windows for all ranks.

Of inner ranks only the first is looked at. The others hold as much, or a little less where a tensor
does not divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from mainstay_core.base.shape import JobShape
from mainstay_core.snapshots.job_units import Expert, JobUnits
from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind, merge_spans
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.exact import layout
from mainstay_train.exact.optimizer import OptimizerFactory, StatePart, element_bytes
from mainstay_train.model import units
from mainstay_train.model.block_spec import BlockSpec
from mainstay_train.model.blocks import built, layout_of
from mainstay_train.model.workload import Workload

MASTER_BYTES = 4
"""Masters are fp32."""


def units_of_workload(
    workload: Workload, shape: JobShape, inner: InnerMesh, device: torch.device
) -> JobUnits:
    """Return the units of a workload's blocks.

    Args:
        workload: what is trained.
        shape: degrees of the job.
        inner: the first rank of a stage.
        device: where the optimizer runs.
    """
    if inner.size == 1:
        layouts = workload.layouts()
    else:
        with torch.device("meta"):
            layouts = tuple(layout_of(spec, built(spec, inner), inner) for spec in workload.blocks)
    stages = workload.stages(shape.stages, shape.cut)
    positions = []
    for stage, inner_rank in shape.positions:
        position = Position(stage=stage, inner=inner_rank)
        tiled = [
            unit
            for index, number in enumerate(stages[stage])
            for unit in _units_of_block(position, index, workload.blocks[number], layouts[number])
        ]
        positions.append(tuple(tiled))
    wheres = workload.statistics(range(len(workload.blocks)))
    experts = [
        expert
        for number, (spec, where) in enumerate(zip(workload.blocks, wheres, strict=True))
        for expert in _experts_of_block(number, spec, where.start)
    ]
    types = _types(workload.optimizer, layouts, device, compute_bytes=workload.dtype.itemsize)
    return JobUnits(positions=tuple(positions), types=types, experts=tuple(experts))


def units_of_parts(
    parts: Sequence[StatePart], optimizer: OptimizerFactory, device: torch.device
) -> JobUnits:
    """Return the units of the pieces of a plain model, which is one stage.

    Args:
        parts: of the model.
        optimizer: of each.
        device: where it runs.
    """
    position = Position(stage=0)
    tiled = [
        _unit(position, index, part.layout, name, names, UnitKind.LAYER)
        for index, part in enumerate(parts)
        for name, names in part.units.items()
    ]
    # Compute weights of a loop of the user's own are never copied: nothing is computed again.
    types = _types(optimizer, [part.layout for part in parts], device, compute_bytes=0)
    return JobUnits(positions=(tuple(tiled),), types=types)


def _units_of_block(
    position: Position, index: int, spec: BlockSpec, flat: layout.BlockLayout
) -> Iterable[Unit]:
    """Yield the units of a block, in the order in which it names them."""
    local_names = [param.name.removeprefix(f"{spec.name}.") for param in flat.params]
    kinds = {f"{spec.name}.{unit.name}": unit.kind for unit in spec.units}
    kinds |= {f"{spec.name}.{name}": UnitKind.EXPERT for name in spec.statistics}
    for name, names in units.tile(spec.name, spec.units, local_names).items():
        yield _unit(position, index, flat, name, names, kinds.get(name, UnitKind.LAYER))


def _unit(
    position: Position,
    index: int,
    flat: layout.BlockLayout,
    name: str,
    names: Iterable[str],
    kind: UnitKind,
) -> Unit:
    places = {param.name: param for param in flat.params}
    spans = merge_spans(
        Span(start=places[n].offset, stop=places[n].offset + layout.padded(places[n].numel))
        for n in names
    )
    return Unit(
        name=name,
        kind=kind,
        position=position,
        block=flat.name,
        block_index=index,
        spans=spans,
    )


def _experts_of_block(number: int, spec: BlockSpec, start: int) -> Iterable[Expert]:
    """Yield the units of a block whose tokens are counted, from a place of a commit's integers."""
    places = {name: start + place for place, name in enumerate(spec.statistics)}
    for unit in spec.units:
        if unit.name in places:
            yield Expert(
                unit=f"{spec.name}.{unit.name}",
                layer=number,
                tokens=places[unit.name],
                probabilities=places.get(f"{unit.name}{units.PROBABILITY}"),
                capacity=unit.capacity,
            )


def _types(
    optimizer: OptimizerFactory,
    layouts: Sequence[layout.BlockLayout],
    device: torch.device,
    *,
    compute_bytes: int,
) -> StateTypes:
    """Return the bytes of an element's state; an optimizer keeps the same of each parameter."""
    shapes: Mapping[str, Sequence[int]] = next(
        ({param.name: param.shape for param in flat.params} for flat in layouts if flat.params), {}
    )
    return StateTypes(
        compute_bytes=compute_bytes,
        master_bytes=MASTER_BYTES,
        optimizer_bytes=element_bytes(optimizer, shapes, device),
    )
