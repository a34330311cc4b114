"""Computes what snapshots and logs take: bytes of an instalment, of host memory, of a log.

The bytes are those of one copy of a job's state: what the shards of all accelerators of one
pipeline hold together.
"""

from __future__ import annotations

from mainstay_core.snapshots.prices import StateTypes
from mainstay_core.theory.profiles import Shape


def instalment_bytes(types: StateTypes, num_active: float, num_frozen: float) -> float:
    """Return the bytes of one sparse snapshot (MoEvement, section 3.2).

    Args:
        types: bytes of the state's tensors.
        num_active: parameters of units that are snapshotted in full.
        num_frozen: parameters of units whose compute weights alone are kept.
    """
    return types.full_bytes * num_active + types.compute_bytes * num_frozen


def frozen_bytes_per_param(types: StateTypes, active_share: float, window: int) -> float:
    """Return the bytes of frozen units' compute weights in all snapshots of a window.

    With units of one size, instalment i (from 0) holds ``1 - (i + 1) a`` of them frozen. This adds
    up to ``c (W - 1) / 2`` where the window divides the units evenly (``a = 1 / W``), and to less
    where its last instalment is not full.

    Args:
        types: bytes of the state's tensors.
        active_share: share of the units that an instalment holds in full, a.
        window: instalments of a window, W.

    Returns:
        Bytes per parameter.
    """
    shares = (max(0.0, 1 - (number + 1) * active_share) for number in range(window))
    return types.compute_bytes * sum(shares)


def gemini_bytes_per_param(types: StateTypes) -> float:
    """Return the host memory of Gemini, per parameter.

    Two dense snapshots (one complete, one being written) and one copy of the compute weights:
    26.0 bytes with FP16 and FP32, which is what table 6 comes to for all four models. The paper
    does not say what its numbers are made of.
    """
    return 2 * types.full_bytes + types.compute_bytes


def log_bytes(shape: Shape, types: StateTypes, num_steps: int) -> float:
    """Return the bytes of a log of all stage borders: activations forward, gradients back.

    Args:
        shape: the job's; every token of a step crosses each of its borders twice.
        types: a border carries what forward and backward read.
        num_steps: steps that the log reaches back.
    """
    tokens = shape.sequences * shape.sequence_length
    return 2 * tokens * shape.width * types.compute_bytes * (shape.num_stages - 1) * num_steps
