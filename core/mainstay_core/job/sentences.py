"""Holds what the model and the CRD say alike where fields of pipeline and recovery contradict.

The model adds the values. The API server takes a message made of numbers for too dear.
"""

from __future__ import annotations

from mainstay_core.base.words import count
from mainstay_core.dmr.settings import WAY

STALE_WITHOUT_CHECKPOINTS = (
    "the job keeps no checkpoint from which a stage could be loaded; set "
    "spec.checkpoint.everySteps, or remove it"
)

ONE_STAGE_SWAPPED = "a single stage has nothing to swap; use InOrder, or more stages"
ONE_MICRO_BATCH_SWAPPED = (
    "a step has a single micro-batch, which takes one of the two ways; use InOrder, or more of "
    "training.lanes, training.shardsPerLane or pipeline.microBatches"
)
COMPILE_OFF = "runtime.compile Off"
WAY_IN_PATH = f"{WAY} in the path of detection.dmr.plan"
EVEN_MICRO_BATCHES = (
    "one micro-batch or an even number (microBatches) with a file as detection.dmr.plan"
)
REPLAY_GRADIENTS = "snapshots.replay Gradients"

GUARDS_IN_ORDER = (
    "in order no stage is an end's twin, from which its layers could be made anew; use 0, or "
    "pipeline.order Swapped"
)
GUARDS_OF_SEVERAL_RANKS = (
    "nobody guards what several ranks of a stage share in this version; use 0, or "
    "parallelism.ranksPerStage 1"
)
TOO_MANY_GUARDS = "the stage beside an end has one cell for each lane at most; use at most as many"

TWO_ENDS_BESIDE_SNAPSHOTS = (
    "with snapshots there are no guards unless they are asked for, so neither of the 2 stages "
    "could be made anew; set approximate.guards (2, or 0 if no stage has a kind of block that the "
    "other lacks), or use false"
)
TWO_ENDS_OF_SEVERAL_RANKS = (
    "with several ranks to a stage nobody guards what each of the 2 stages alone has (embedding, "
    "head), so neither could be made anew; use false, or more stages, or checkpoints "
    "(checkpoint.everySteps) and approximateAfterLostSteps below approximate.staleSteps, or "
    "parallelism.ranksPerStage 1, or approximate.guards 0 if no stage has a kind of block that the "
    "other lacks"
)


def swapped_only_with(*wanted: str) -> str:
    """Return what is said of a swapped pipeline beside which this version has nothing else."""
    return f"with which this version can only have {', '.join(wanted)}; use that, or InOrder"


def no_neighbours(num_stages: int, *, keeps_checkpoints: bool) -> str:
    """Return why in a pipeline in order of one stage, or two, none can be made anew.

    Args:
        num_stages: of the pipeline.
        keeps_checkpoints: whether the job writes some: one of two stages may load its own.
    """
    own = (
        "approximateAfterLostSteps below approximate.staleSteps, so that a stage loads a "
        "checkpoint of its own"
    )
    if not keeps_checkpoints:
        own = f"checkpoints (checkpoint.everySteps) and {own}"
    others = f", or pipeline.order Swapped, or {own}" if num_stages > 1 else ""
    return (
        f"with {count(num_stages, 'stage')} no stage has two neighbours to make it anew from; use "
        f"false, or more stages{others}"
    )
