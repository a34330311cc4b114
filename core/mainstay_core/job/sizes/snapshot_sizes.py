"""Computes the memory that a pod needs for snapshots of the state, and settles how they are kept.

A pod's store of segments holds what its own ranks have written and what other pods sent it. Of each
part of the state that is at most

    one complete snapshot + one in the making + the gradients of the steps since the complete one

or, in a job that logs boundaries instead of gradients, compute weights beside the snapshots, and of
each step what the pod's own ranks gave their neighbours

(MoEvement, arXiv 2412.15411, section 3.2: one persisted checkpoint and one in flight). The ranks of
a position divide its parts among them. So a lost replica makes the others' shares larger.

Two numbers follow. The *bound* (:func:`store_bytes`) is what a store must have room for: a replica
is missing, and each window waits :data:`LAG_STEPS` for its copies. The *expected* bytes
(:func:`expected_store_bytes`) are what it holds at its fullest, or less than that, while nobody is
lost and each window is complete with the votes on its last version.

Both are for whole windows, and for pods that are spread evenly over failure domains. A settle gives
a window up: until the next one is complete, more is held than in any course of whole windows, and a
store without room for it evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mainstay_core.base.bounds import MAX_COPY_BYTES
from mainstay_core.base.dealing import divide_by_weight
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count, show_bytes
from mainstay_core.job import model_sizes
from mainstay_core.job.config import (
    DECAY_ONE,
    LAG_STEPS,
    MAX_AUTO_WINDOW,
    MAX_SNAPSHOT_WINDOW,
    LogKind,
    SnapshotConfig,
    check_window,
)
from mainstay_core.job.sections import Protection, Snapshots, Workload
from mainstay_core.job.sizes.block_sizes import BlockSizes, ModelSizes
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.llama_sizes import padded
from mainstay_core.job.sizes.snapshot_logs import LogChoice, choose_log, compute_bytes, type_bytes
from mainstay_core.job.stages import cut_blocks
from mainstay_core.job.types import whole_quantity

PATH = "spec.snapshots"
MARGIN = 4
"""Auto adds one part in so many: shares of pods are not quite even, and freed room has gaps."""
PAGE_BYTES = 4096
"""Segments begin at whole pages."""
ALIGNMENT_BYTES = 64
KINDS = 4
"""Tensors of a parameter's state: master, two moments, and the number of its steps."""
WIDE_BYTES = 4
"""Masters and gradients are fp32."""


def max_log_steps(length: int, lag: int = LAG_STEPS) -> int:
    """Return the most steps whose gradients are kept at a time.

    With windows of W steps that are complete l steps after their last instalment, a window begins
    W + l steps after the one before. The older is dropped when the newer is complete, which is
    another W + l steps later. A replay computes one step less at most.

    Args:
        length: of a window.
        lag: steps from a window's last instalment to the commit that completes it.
    """
    return 2 * (length + lag)


def store_bytes(
    models: Sequence[ModelSizes],
    shape: JobShape,
    *,
    window: int,
    peers: int,
    log: LogKind = LogKind.GRADIENTS,
) -> int:
    """Return the least memory with which a pod keeps all that it has to keep.

    It is a bound, with windows that wait :data:`LAG_STEPS` for their holders each time. No pod has
    a larger share of a position than its ranks would have if all of them were of the largest
    position. It holds such shares for as many other pods as each part has peers, and for one more,
    as peers are chosen by failure domain and stage before size.

    Args:
        models: sizes of the blocks, for the inner ranks that are known.
        shape: degrees of the job; one of the wanted replicas may be missing.
        window: steps of a window; 0: as many as the trainers choose at most, which is one for each
            unit of the position that has most of them, and :data:`MAX_AUTO_WINDOW`.
        peers: other pods that keep each part.
        log: from what a lost state is made anew.

    Raises:
        ValueError: there are more stages than blocks.
    """
    num_cells = max(1, shape.replicas - 1)
    course = _Course(lag=LAG_STEPS, num_cells=num_cells, num_shares=_num_shares(peers))
    return _kept_in(course, models, shape, window, log)


def expected_store_bytes(
    models: Sequence[ModelSizes],
    shape: JobShape,
    *,
    window: int,
    peers: int,
    log: LogKind = LogKind.GRADIENTS,
    lag: int = 0,
) -> int:
    """Return what no store holds more than where nobody is lost.

    It is that of a pod whose ranks have the largest shares of any position, as have those whose
    copies it holds, with one pod's more than each part has peers. Most stores hold less. The
    fullest moment is the commit that completes a window: both windows are there whole, and the logs
    of all steps of both.

    Args:
        models: as of :func:`store_bytes`, as are the rest.
        shape: degrees of the job; all wanted replicas are there.
        window: steps of a window, or 0.
        peers: other pods that keep each part.
        log: from what a lost state is made anew.
        lag: steps from a window's last instalment to the commit that completes it. Copies that are
            at their holders by the vote on that very version have none.

    Raises:
        ValueError: there are more stages than blocks.
    """
    course = _Course(
        lag=lag, num_cells=shape.replicas, num_shares=_num_shares(peers), is_dealt=True
    )
    return _kept_in(course, models, shape, window, log)


def _num_shares(peers: int) -> int:
    """Return how many shares of positions lie in a store at most, for each rank of its pod.

    Its own, those of as many others as each part has peers, and of one more: peers are chosen by
    failure domain and stage before size.
    """
    return 1 + peers + min(peers, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Course:
    """The course of a job for which it is computed what a store holds."""

    lag: int
    num_cells: int
    """Of each position, that are there."""
    num_shares: int
    """Of positions, that lie in a store for each rank of its pod."""
    is_dealt: bool = False
    """Whether shares are as trainers deal out the units to so many cells. Who is lost in which
    window may make one larger, by up to a block."""


def _kept_in(
    course: _Course, models: Sequence[ModelSizes], shape: JobShape, window: int, log: LogKind
) -> int:
    """Return what a store holds at its fullest in a course."""
    cuts = _cuts(models[0], shape)
    length = window or _longest(models[0], cuts)
    num_steps = max_log_steps(length, course.lag)
    largest_share = total = 0
    for cut in cuts:
        stage = [
            [
                _kept(model.blocks[i], num_steps)
                if log is LogKind.GRADIENTS
                else _kept_with_weights(model, model.blocks[i], length)
                for i in cut
            ]
            for model in models
        ]
        for model, kept in zip(models, stage, strict=True):
            blocks = [model.blocks[i] for i in cut]
            # A unit is not divided: who has the most has up to a block more than an even share.
            most = min(sum(kept), -(-sum(kept) // course.num_cells) + max(kept))
            dealt = _largest_dealt(blocks, kept, course.num_cells) if course.is_dealt else most
            largest_share = max(largest_share, dealt)
        total += shape.ranks_per_stage * max(map(sum, stage))
    copies = min(course.num_shares * shape.ranks_per_pod * largest_share, total)
    if log is LogKind.GRADIENTS:
        return copies
    # A pod keeps what its own ranks have sent, with the types of the replica that is missing.
    num_types = -(-shape.lanes * shape.shards_per_lane // course.num_cells)
    sent = max(type_bytes(model, cut, shape) for model in models for cut in cuts)
    return copies + num_steps * num_types * shape.ranks_per_pod * sent


def _largest_dealt(blocks: Sequence[BlockSizes], kept: Sequence[int], num_cells: int) -> int:
    """Return the largest cell's part of what is kept of a position, dealt out as trainers do.

    Units of one block are taken as equally large.

    Args:
        blocks: of the position.
        kept: of each block.
        num_cells: to which its units are dealt.
    """
    weights, sizes = [], []
    for block, size in zip(blocks, kept, strict=True):
        state = WIDE_BYTES * sum(map(padded, block.parameters)) + block.moments_bytes
        weights += [-(-state // block.num_units)] * block.num_units
        sizes += [-(-size // block.num_units)] * block.num_units
    shares = divide_by_weight(weights, range(num_cells))
    return max(sum(sizes[unit] for unit in share) for share in shares)


def _cuts(model: ModelSizes, shape: JobShape) -> tuple[range, ...]:
    return tuple(_cut(tuple(block.cost for block in model.blocks), shape.stages, shape.cut))


def _longest(model: ModelSizes, cuts: Sequence[range]) -> int:
    """Return the most steps of a window that trainers choose by themselves."""
    return min(MAX_AUTO_WINDOW, _most_units(model, cuts))


def most_units(model: ModelSizes, shape: JobShape) -> int:
    """Return the units of the stage that has the most.

    Raises:
        ValueError: there are more stages than blocks.
    """
    return _most_units(model, _cuts(model, shape))


def _most_units(model: ModelSizes, cuts: Sequence[range]) -> int:
    return max(sum(model.blocks[i].num_units for i in cut) for cut in cuts)


def _kept_with_weights(model: ModelSizes, block: BlockSizes, length: int) -> int:
    """Return what is kept of a block where boundaries are logged: two windows of copies.

    Whatever its place in a window, its compute weights are copied at every version before it.
    """
    return _kept(block, 0) + 2 * (length - 1) * (
        compute_bytes(model, block) + block.num_units * PAGE_BYTES
    )


def _kept(block: BlockSizes, num_steps: int) -> int:
    """Return what is kept of a block: two states, and the gradients of some steps."""
    width = WIDE_BYTES * sum(map(padded, block.parameters))
    # Each unit is a segment of its own, and each tensor of several units begins at a cache line.
    gaps = (2 + num_steps) * block.num_units * PAGE_BYTES
    if block.num_units > 1:
        gaps += (2 * KINDS + num_steps) * ALIGNMENT_BYTES * len(block.parameters)
    return 2 * (width + block.moments_bytes) + num_steps * width + gaps


_cut = lru_cache(maxsize=256)(cut_blocks)
"""Cached, as each look at a job asks for it, and cutting a deep model is not free."""


def plan_snapshots(
    snapshots: Snapshots,
    protection: Protection,
    workload: Workload,
    shape: JobShape,
    num_pods: int,
) -> SnapshotConfig | None:
    """Return how the state is kept in the memory of pods; None if it is not.

    Args:
        snapshots: ``spec.snapshots``.
        protection: ``spec.protection``.
        workload: says how large the model is, if it is the built-in one.
        shape: degrees of the job.
        num_pods: pods of the job, spares included: they keep copies as well.

    Raises:
        InvalidSpecError: the settings contradict the job, or are too little for it.
    """
    if not snapshots.enabled:
        return None
    window = 0 if snapshots.window == "Auto" else snapshots.window
    _check_degrees(snapshots, protection, window, num_pods)
    _check_ordering(snapshots, workload)
    models = known_models(workload, shape)
    choice = choose_log_of(snapshots, models, shape)
    log = choice.log
    least = None
    if models is not None:
        least = store_bytes(models, shape, window=window, peers=snapshots.peers, log=log)
    if snapshots.memory == "Auto":
        if least is None:
            raise InvalidSpecError(
                f"{PATH}.memory",
                f"is Auto, but how much memory the model of {workload.entrypoint} takes is not "
                "known before it runs; use an amount, e.g. 8Gi (`mainstay local run FILE "
                "--dry-run` says then whether it is enough)",
            )
        memory = least + -(-least // MARGIN)
    else:
        memory = whole_quantity(snapshots.memory)
        most = replace(shape, replicas=shape.lanes)
        if models is not None:
            least = store_bytes(models, most, window=window, peers=snapshots.peers, log=log)
        # The amount cannot change, and the number of replicas can: with fewer a pod keeps more.
        check_memory(snapshots.memory, memory, least or 1)
    if memory > MAX_COPY_BYTES:
        raise InvalidSpecError(
            f"{PATH}.memory",
            f"is {snapshots.memory}, which makes {show_bytes(memory)} of a pod; use at most "
            f"{show_bytes(MAX_COPY_BYTES)}, with a shorter window, fewer peers or more replicas",
        )
    return SnapshotConfig(
        memory_bytes=memory,
        num_instalments=window,
        peers=snapshots.peers,
        domains=protection.domains,
        ordering=snapshots.ordering,
        decay=DECAY_ONE * snapshots.decay_percent // 100,
        boundary=log is LogKind.BOUNDARY,
        log_reason=choice.reason,
        auto_log=snapshots.replay == "Auto",
    )


def check_new_window(snapshots: Snapshots, workload: Workload, shape: JobShape) -> None:
    """Refuse a window that is too long for a job which is about to begin.

    A job that has begun keeps its window, as it cannot change there: steps that copy nothing cost
    nothing.

    Args:
        snapshots: ``spec.snapshots``.
        workload: says how large the model is, if it is the built-in one.
        shape: degrees of the job.

    Raises:
        InvalidSpecError: it has more steps than any stage has units.
    """
    if not snapshots.enabled or snapshots.window == "Auto":
        return
    models = known_models(workload, shape)
    if models is not None:
        check_window(snapshots.window, most_units(models[0], shape))


def choose_log_of(
    snapshots: Snapshots, models: Sequence[ModelSizes] | None, shape: JobShape
) -> LogChoice:
    """Return from what the job's lost states are made anew, and why.

    Args:
        snapshots: ``spec.snapshots``.
        models: sizes of the blocks, for the inner ranks that are known; None if nothing is.
        shape: degrees of the job.

    Raises:
        InvalidSpecError: it cannot be what the spec says.
    """
    cuts = () if models is None else _cuts(models[0], shape)
    length = 1 if models is None else _longest(models[0], cuts)
    return choose_log(
        snapshots.replay,
        models,
        cuts,
        shape,
        window=length if snapshots.window == "Auto" else snapshots.window,
        peers=snapshots.peers,
    )


def check_memory(told: str, memory_bytes: int, least_bytes: int) -> None:
    """Refuse a store of segments in which a pod's share does not fit.

    Args:
        told: ``spec.snapshots.memory`` as the user wrote it.
        memory_bytes: what that is.
        least_bytes: what a pod keeps where each lane has a replica: the least to which any scaling
            brings it.

    Raises:
        InvalidSpecError: it is less.
    """
    if memory_bytes < least_bytes:
        least_mib = -(-least_bytes // 2**20)
        raise InvalidSpecError(
            f"{PATH}.memory",
            f"is {told}, but a pod keeps {show_bytes(least_bytes)} of snapshots and logs; use "
            f"at least {least_mib}Mi",
        )


def describe_shortage(snapshots: Snapshots, workload: Workload, shape: JobShape) -> str:
    """Return what a pod keeps more than ``spec.snapshots.memory`` with the replicas that there are.

    It is empty where the amount is enough, or nobody knows. Such a job trains, and its state may
    not be covered.
    """
    if not snapshots.enabled or snapshots.memory == "Auto":
        return ""
    models = known_models(workload, shape)
    if models is None:
        return ""
    log = choose_log_of(snapshots, models, shape).log
    window = 0 if snapshots.window == "Auto" else snapshots.window
    least = store_bytes(models, shape, window=window, peers=snapshots.peers, log=log)
    return shortage(snapshots.memory, whole_quantity(snapshots.memory), least, shape)


def shortage(told: str, memory_bytes: int, least_bytes: int, shape: JobShape) -> str:
    """Return in one sentence that a pod keeps more than it has memory for; empty where it has.

    Args:
        told: ``spec.snapshots.memory`` as the user wrote it.
        memory_bytes: what that is.
        least_bytes: what a pod keeps with as many replicas as there are.
        shape: degrees of the job.
    """
    if memory_bytes >= least_bytes:
        return ""
    return (
        f"{PATH}.memory: is {told}, but with {count(shape.replicas, 'replica')} a pod keeps "
        f"{show_bytes(least_bytes)} of snapshots and logs: where that finds no room, the state is "
        f"not covered; use {-(-least_bytes // 2**20)}Mi in a job that is created anew, or more "
        f"replicas, at most {shape.lanes}"
    )


def _check_degrees(
    snapshots: Snapshots, protection: Protection, window: int, num_pods: int
) -> None:
    if window > MAX_SNAPSHOT_WINDOW:
        raise InvalidSpecError(
            f"{PATH}.window", f"is {window}, must be at most {MAX_SNAPSHOT_WINDOW} steps, or Auto"
        )
    if snapshots.peers >= num_pods:
        raise InvalidSpecError(
            f"{PATH}.peers",
            f"is {snapshots.peers}, but the job has {count(num_pods, 'pod')}, spares included, so "
            f"each has {num_pods - 1} beside it; use at most {num_pods - 1}, or more spares",
        )
    if protection.domains > num_pods:
        raise InvalidSpecError(
            "spec.protection.domains",
            f"is {protection.domains}, but the job has {count(num_pods, 'pod')}, spares included; "
            f"use at most {num_pods}, or more spares",
        )


def _check_ordering(snapshots: Snapshots, workload: Workload) -> None:
    """Refuse an order of which a built-in model does not tell enough; a user's tells it later."""
    if workload.entrypoint != model_sizes.MOE:
        return
    if snapshots.ordering == "CapacityAware":
        raise InvalidSpecError(
            f"{PATH}.ordering",
            "is CapacityAware, but the experts of the built-in mixture have no capacity, as no "
            "token is dropped; use Popularity",
        )
    if snapshots.ordering == "SoftCount" and workload.config.get("counts") != "probabilities":
        raise InvalidSpecError(
            f"{PATH}.ordering",
            "is SoftCount, but the built-in mixture counts tokens alone; set "
            "spec.workload.config.counts to probabilities, or use Popularity",
        )


def known_models(workload: Workload, shape: JobShape) -> list[ModelSizes] | None:
    """Return the sizes of the model's blocks; None where they are not known here."""
    config = workload.config
    if workload.entrypoint not in model_sizes.BUILT_IN:
        return None
    model_sizes.check_config(workload.entrypoint, config)
    model_sizes.check_ranks(workload.entrypoint, shape.ranks_per_stage)
    if shape.stages * model_sizes.num_blocks(config) ** 2 > model_sizes.MAX_CUTS:
        return None
    models = [
        built_in_sizes(
            workload.entrypoint,
            config,
            shape.ranks_per_stage,
            inner,
            accumulates=shape.micro_batches > 1,
        )
        for inner in sorted({0, shape.ranks_per_stage - 1})
    ]
    try:
        _cuts(models[0], shape)
    except ValueError as error:
        raise InvalidSpecError("spec.parallelism.stages", str(error)) from error
    return models
