"""Computes what a step takes from profiled parts: the iteration model of MoEvement, appendix C."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mainstay_core.base.bounds import Longest, Range, Seconds

MAX_PIPELINES = 65_536
MAX_STAGES = 65_536
PipelineStages = Annotated[tuple[Seconds, ...], Longest(MAX_STAGES)]
"""Seconds of a micro-batch in each stage of one pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """An affine model of a collective among a fixed group: latency, and seconds per byte."""

    latency_s: Seconds = 0.0
    s_per_byte: Annotated[float, Range(0.0, 1.0)] = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Return what the collective takes for a message of this size."""
        return self.latency_s + self.s_per_byte * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The profiled parts of a step.

    Attributes:
        num_micro_batches: of one pipeline in a step, M.
        stage_s: for each pipeline, the seconds of a micro-batch in each stage (forward, backward
            and communication inside of the stage), t_s.
        sync: model of the all-reduce of gradients.
        sync_bytes: what that all-reduce carries for one accelerator.
        sync_overlap: share of it that happens beside the backward pass.
        update_s: the optimizer's update.
    """

    num_micro_batches: Annotated[int, Range(1, 2**40)]
    stage_s: Annotated[tuple[PipelineStages, ...], Longest(MAX_PIPELINES)]
    sync: Collective = Collective()
    sync_bytes: Annotated[float, Range(0.0, 1e18)] = 0.0
    sync_overlap: Annotated[float, Range(0.0, 1.0)] = 0.0
    update_s: Seconds = 0.0


def pipeline_s(num_micro_batches: int, stage_s: tuple[float, ...]) -> float:
    """Return what one pipeline takes for its passes: ``(M + S - 1) max t_s`` (appendix C).

    Args:
        num_micro_batches: M, at least 1.
        stage_s: t_s of its S stages; nothing for a pipeline without stages.
    """
    if not stage_s:
        return 0.0
    return (num_micro_batches + len(stage_s) - 1) * max(stage_s)


def step_s(times: StepTimes) -> float:
    """Return T_iter: the slowest pipeline, what shows of the all-reduce, and the update."""
    slowest = max((pipeline_s(times.num_micro_batches, s) for s in times.stage_s), default=0.0)
    sync = times.sync.seconds(times.sync_bytes) * (1 - times.sync_overlap)
    return slowest + sync + times.update_s
