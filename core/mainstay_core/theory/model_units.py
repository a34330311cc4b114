"""Builds the units of a job from its profile: as many, and as large, as its counts say."""

from __future__ import annotations

from mainstay_core.job.sizes.reduction_sizes import PAD
from mainstay_core.snapshots.units import Position, Span, Unit, UnitKind
from mainstay_core.snapshots.windows import PrintedWindow, find_window_size
from mainstay_core.theory.profiles import JobProfile


def build_units(profile: JobProfile) -> tuple[Unit, ...]:
    """Return the units of all stages: of each layer its experts, its gate and the rest.

    A gate has width x experts parameters. What is neither an expert's nor a gate's is shared out
    evenly among the layers, the embedding included. Layers go to stages in runs that differ by at
    most one layer, the longer ones first.
    """
    model, width = profile.model, profile.shape.width
    routed = model.expert_share * model.num_params
    expert = routed / (model.num_layers * model.num_experts)
    gate = width * model.num_experts
    rest = (model.num_params - routed) / model.num_layers - gate
    units = []
    for layer in range(model.num_layers):
        stage, index = _place(layer, model.num_layers, profile.shape.num_stages)
        position, block = Position(stage=stage), f"layers.{layer}"
        sizes = [(f"expert.{e}", UnitKind.EXPERT, expert) for e in range(model.num_experts)]
        sizes += [("gate", UnitKind.GATE, gate), ("rest", UnitKind.REST, rest)]
        start = 0
        for name, kind, num_params in sizes:
            stop = start + max(1, round(num_params / PAD)) * PAD
            units.append(
                Unit(
                    name=f"{block}.{name}",
                    kind=kind,
                    position=position,
                    block=block,
                    block_index=index,
                    spans=(Span(start=start, stop=stop),),
                )
            )
            start = stop
    return tuple(units)


def _place(layer: int, num_layers: int, num_stages: int) -> tuple[int, int]:
    """Return the stage of a layer, and its place there."""
    least, longer = divmod(num_layers, num_stages)
    border = longer * (least + 1)
    if layer < border:
        return divmod(layer, least + 1)
    stage, index = divmod(layer - border, max(least, 1))
    return longer + stage, index


def find_printed_window(profile: JobProfile) -> PrintedWindow:
    """Return the window of MoEvement's algorithm 1, which takes all units for equal."""
    num_units = profile.model.num_units
    params = profile.model.num_params / num_units
    return find_window_size(
        num_units,
        step_s=profile.step_s,
        compute_bytes=params * profile.types.compute_bytes,
        master_bytes=params * profile.types.master_bytes,
        optimizer_bytes=params * sum(profile.types.optimizer_bytes),
        bandwidth_bytes_per_s=profile.snapshot_bytes_per_s,
    )
