"""The blocks of every stage as a re-initialisation sees them, of shapes alone."""

from __future__ import annotations

import torch

from mainstay_core.base.shape import Cut
from mainstay_core.reinitialisation.likeness import kind_of
from mainstay_core.wire.reinitialisation import BlockOutline, Outline
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.model.block_spec import BlockSpec
from mainstay_train.model.blocks import built, layout_of
from mainstay_train.model.workload import Workload


def outline_of(
    workload: Workload, num_stages: int, inner: InnerMesh, cut: Cut = Cut.BALANCED
) -> Outline:
    """Return the blocks of every stage; it is the same on every rank.

    Args:
        workload: what is trained.
        num_stages: of the pipeline.
        inner: the first rank of a stage.
        cut: the rule by which the model is cut.
    """
    outlined = [_outlined(spec, inner) for spec in workload.blocks]
    stages = workload.stages(num_stages, cut)
    return tuple(tuple(outlined[i] for i in stage) for stage in stages)


def _outlined(spec: BlockSpec, inner: InnerMesh) -> BlockOutline:
    with torch.device("meta"):
        params = layout_of(spec, built(spec, inner), inner).params
    local = {param.name.removeprefix(f"{spec.name}."): param for param in params}
    return BlockOutline(
        name=spec.name,
        kind=kind_of((name, param.shape) for name, param in local.items()),
        rule=spec.reinitialise,
        copied=tuple(name for name, param in local.items() if param.copy),
    )
