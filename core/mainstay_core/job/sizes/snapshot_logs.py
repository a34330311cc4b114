"""Chooses from what a lost state is made anew: logs of gradients, or of stage boundaries.

Both logs grow with every step until a newer window of copies is complete. Gradients are as large
as the model, and lie in several pods. What crosses a boundary is as large as a step's activations
there, and stays in the sender's pod; beside it the compute weights of units whose turn in the
window is still to come are copied (MoEvement, arXiv 2412.15411, sections 3.2 and 3.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import show_bytes
from mainstay_core.job.config import LogKind
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.llama_sizes import padded

PATH = "spec.snapshots.replay"
WIDE_BYTES = 4
"""Masters and gradients are fp32."""
PAGE_BYTES = 4096
"""Segments begin at whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """The kind of log of a job, and why it is that one."""

    log: LogKind
    reason: str
    """One sentence for people."""


def choose_log(
    replay: str,
    models: Sequence[ModelSizes] | None,
    cuts: Sequence[range],
    shape: JobShape,
    *,
    window: int,
    peers: int,
) -> LogChoice:
    """Return from what the job's lost states are made anew.

    ``Auto`` is the kind with fewer bytes a step, of those that the job can have and that cover what
    may be lost.

    Args:
        replay: ``spec.snapshots.replay``.
        models: sizes of the blocks; None if they are not known before the job runs.
        cuts: the blocks of each stage; unused without sizes.
        shape: degrees of the job.
        window: steps of a window of copies.
        peers: other pods that keep each copy.
    """
    if replay != "Auto":
        return LogChoice(log=LogKind(replay.lower()), reason=f"{PATH} says {replay}")
    why_gradients = _why_gradients(shape)
    if models is None:
        unknown = "the sizes of the model are not known before it runs"
        return LogChoice(log=LogKind.GRADIENTS, reason=why_gradients or unknown)
    gradients = gradient_bytes(models, shape, peers=peers)
    boundary = boundary_bytes(models, cuts, shape, window=window, peers=peers)
    costs = (
        f"a step adds {show_bytes(gradients)} of gradients to all stores together, or "
        f"{show_bytes(boundary)} of what crosses stage boundaries and of compute weights"
    )
    if why_gradients:
        return LogChoice(log=LogKind.GRADIENTS, reason=f"{why_gradients} ({costs})")
    log = LogKind.BOUNDARY if boundary < gradients else LogKind.GRADIENTS
    return LogChoice(
        log=log, reason=f"{costs}, and with one replica both cover the loss of the same pods"
    )


def _why_gradients(shape: JobShape) -> str:
    """Return why ``Auto`` takes gradients whatever they cost; empty if it need not.

    What a stage sends lies in its sender's pod alone, for each shard type in another replica's. A
    replay needs it of the living stages beside the lost ones. With one replica a pod that is lost
    takes with it the logs of the stages that it computed, which are lost themselves, and log again
    as they are made anew. With several the job goes on without a lost cell: its logs are gone, and
    nobody computes those types again.
    """
    if shape.order is not Order.IN_ORDER:
        return "in a swapped pipeline what crosses the boundaries of stages is not logged"
    # Replicas may be added until each lane has one.
    if shape.lanes > 1:
        return (
            f"a job with {shape.lanes} lanes goes on without a lost replica, and what that one had "
            "sent is in no other pod: until the next window is complete, the stages beside its own "
            "could not be made anew from logs of boundaries"
        )
    if shape.ranks_per_stage > 1:
        return (
            "with several ranks to a stage all of a cell would have to compute again for one of "
            "them that is lost"
        )
    return ""


def gradient_bytes(models: Sequence[ModelSizes], shape: JobShape, *, peers: int) -> int:
    """Return what logs of gradients add to all stores in a step."""
    sizes = [WIDE_BYTES * sum(map(padded, block.parameters)) for block in blocks_of(models, shape)]
    return (1 + peers) * sum(sizes)


def boundary_bytes(
    models: Sequence[ModelSizes],
    cuts: Sequence[range],
    shape: JobShape,
    *,
    window: int,
    peers: int,
) -> int:
    """Return what logs of boundaries, with their compute weights, add to all stores in a step.

    A unit waits for half a window on average, and its compute weights are copied that often.
    """
    num_types = shape.lanes * shape.shards_per_lane
    # Each inner rank gives the same rank of the next stage the whole activation.
    sent = shape.ranks_per_stage * sum(type_bytes(models[0], cut, shape) for cut in cuts)
    model = models[0]
    compute = sum(compute_bytes(model, block) for block in blocks_of(models, shape))
    return num_types * sent + (1 + peers) * compute * (window - 1) // (2 * window)


def type_bytes(model: ModelSizes, cut: range, shape: JobShape) -> int:
    """Return what a stage gives its neighbours for one shard type: both ways, in whole pages."""
    ends = [cut.stop - 1] if cut.stop < len(model.blocks) else []
    ends += [cut.start - 1] if cut.start > 0 else []
    pages = sum(-(-model.blocks[end].output_bytes // PAGE_BYTES) for end in ends)
    return shape.micro_batches * pages * PAGE_BYTES


def compute_bytes(model: ModelSizes, block: BlockSizes) -> int:
    """Return the compute weights of a block: the masters where there are no others."""
    return min(WIDE_BYTES, model.width_bytes) * sum(map(padded, block.parameters))


def blocks_of(models: Sequence[ModelSizes], shape: JobShape) -> list[BlockSizes]:
    """Return the blocks of all inner ranks; those that are not known are as the largest known."""
    known = [model.blocks for model in models]
    missing = [known[0]] * (shape.ranks_per_stage - len(known))
    return [block for blocks in [*known, *missing] for block in blocks]
