"""Computes what pods send each other of snapshots and logs while a job trains.

Each unit's state and each of its logs is written by one rank of its position, and goes from that
rank's pod to as many others as there are peers. Of logs of boundaries nothing is sent: what a stage
gave its neighbours stays in its own pod, and compute weights go in its place (MoEvement, arXiv
2412.15411, sections 3.2 and 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count, show_bytes
from mainstay_core.job.config import MAX_AUTO_WINDOW, LogKind
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.llama_sizes import padded
from mainstay_core.job.sizes.snapshot_logs import blocks_of, compute_bytes
from mainstay_core.job.sizes.snapshot_sizes import WIDE_BYTES, most_units


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTraffic:
    """The bytes that all pods of a job together send each other, so that others keep them."""

    step_bytes: int
    """Logs, in each step."""
    window_bytes: int
    """Copies of states, and of compute weights where boundaries are logged, in each window."""
    window: int
    """Steps of a window; where trainers choose them, the most that they choose."""
    is_chosen: bool
    """Whether trainers choose them: as few as let the copies fit beside a step."""


def pod_traffic(
    models: Sequence[ModelSizes],
    shape: JobShape,
    *,
    window: int,
    peers: int,
    log: LogKind,
) -> PodTraffic:
    """Return what pods send each other while nobody is lost.

    Units of a window are taken as equally large: that matters for compute weights alone, which are
    copied until their unit's turn comes.

    Args:
        models: sizes of the blocks, for the inner ranks that are known.
        shape: degrees of the job.
        window: steps of a window; 0: as many as trainers choose at most.
        peers: other pods that keep each part.
        log: from what a lost state is made anew.
    """
    length = window or min(MAX_AUTO_WINDOW, most_units(models[0], shape))
    blocks = blocks_of(models, shape)
    copies, logs = sum(map(_state_bytes, blocks)), 0
    if log is LogKind.GRADIENTS:
        logs = WIDE_BYTES * sum(padded(numel) for b in blocks for numel in b.parameters)
    else:
        copies += sum(compute_bytes(models[0], block) for block in blocks) * (length - 1) // 2
    return PodTraffic(
        step_bytes=peers * logs,
        window_bytes=peers * copies,
        window=length,
        is_chosen=window == 0,
    )


def describe_traffic(traffic: PodTraffic) -> str:
    """Return in a sentence what pods send each other of snapshots and logs."""
    steps, size = count(traffic.window, "step"), show_bytes(traffic.window_bytes)
    copies = f"{size} of copies in each window of {steps}"
    if traffic.is_chosen:
        fewer = "fewer where copies fit beside a step"
        copies = f"up to {size} of copies in each window, which has {steps} at most and {fewer}"
    if traffic.step_bytes:
        logs = f"{show_bytes(traffic.step_bytes)} of logs in each step"
        return f"all pods together send each other {logs}, and {copies}"
    return f"all pods together send each other {copies}; logs stay in their pods"


def _state_bytes(block: BlockSizes) -> int:
    return WIDE_BYTES * sum(map(padded, block.parameters)) + block.moments_bytes
