"""Computes what the ranks of a job would hold and send; nothing of the job is started.

Formulas are for the built-in models. A user's blocks are measured by a process with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mainstay_cli.base.exits import UsageError
from mainstay_cli.local import manifests, preflight, torch_process
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job import model_sizes
from mainstay_core.job.approximation import made_anew
from mainstay_core.job.config import check_window
from mainstay_core.job.guards import resolve_guards
from mainstay_core.job.sizes.block_sizes import Measurement, MeasureQuestion, ModelSizes
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.rank_sizes import RankSizes, rank_sizes
from mainstay_core.job.sizes.snapshot_sizes import (
    check_memory,
    expected_store_bytes,
    most_units,
    shortage,
    store_bytes,
)
from mainstay_core.job.sizes.snapshot_traffic import PodTraffic, pod_traffic
from mainstay_core.job.spec import TrainingJob
from mainstay_core.planning.shares import first_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSizes:
    """The memory of each pod for snapshots and logs."""

    memory_bytes: int
    """What it is given: ``spec.snapshots.memory``."""
    least_bytes: int
    """The least with which it keeps all that it has to: the bound."""
    expected_bytes: int
    """What it holds at most while nobody is lost and copies are at their holders in time."""
    log: str
    """From what a lost state is made anew: ``gradients`` or ``boundary``."""
    log_reason: str
    """Why, in one sentence."""
    traffic: PodTraffic
    """What pods send each other."""
    problem: str = ""
    """That the job's replicas are so few that a pod keeps more than that; empty: it fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSizes:
    """The sizes of all ranks of a job, and how they are known."""

    ranks: tuple[RankSizes, ...]
    is_measured: bool
    """Of blocks that one micro-batch was taken through, not by formulas."""
    compiles: bool
    """Whether the job's blocks are compiled: what is known is of blocks that are not."""
    store: StoreSizes | None = None
    """None in a job without snapshots."""
    waiting_bytes: int = 0
    """What checks that wait keep in a rank at most, beside what is told of it."""


def compute_sizes(file: manifests.JobFile) -> JobSizes:
    """Return the sizes of all ranks of a job's first plan.

    Raises:
        UsageError: the job cannot be used, or its blocks fail.
        MachineError: a user's blocks cannot be measured here.
    """
    job = file.job
    preflight.check_entrypoint(job, manifests.search_path(file.path))
    is_measured = job.spec.workload.entrypoint not in model_sizes.BUILT_IN
    try:
        models = _measure(file) if is_measured else _by_formula(file)
        shares = first_shares(job.shape, _redundancy(file))
        spec = job.spec
        guards = resolve_guards(spec.recovery, job.shape, snapshots=spec.snapshots.enabled)
        ranks = [
            rank
            for model in models
            for rank in rank_sizes(
                model,
                job.shape,
                shares,
                recompute=job.spec.runtime.recomputed,
                bucket_bytes=job.spec.runtime.bucket_bytes,
                guards=guards,
                made=made_anew(spec.recovery),
            )
        ]
        store = _store(job, models)
    except InvalidSpecError as error:
        raise UsageError(f"{file.path}: {error}") from error
    ranks.sort(key=lambda rank: (rank.replica, rank.stage, rank.inner))
    compiles = job.spec.runtime.compile != "Off"
    return JobSizes(
        ranks=tuple(ranks),
        is_measured=is_measured,
        compiles=compiles,
        store=store,
        waiting_bytes=job.spec.detection.dmr.waiting_bytes,
    )


def _store(job: TrainingJob, models: Sequence[ModelSizes]) -> StoreSizes | None:
    """Return the memory of a pod's store of segments; refuse one that is too small.

    A window of more steps than a stage has units is refused as well.
    """
    kept = job.plan_snapshots()
    if kept is None:
        return None
    check_window(kept.num_instalments, most_units(models[0], job.shape))
    scaled = replace(job.shape, replicas=job.shape.lanes)
    how: Any = {"window": kept.num_instalments, "peers": kept.peers, "log": kept.log}
    least, of_all = (store_bytes(models, shape, **how) for shape in (job.shape, scaled))
    told = job.spec.snapshots.memory
    check_memory(told, kept.memory_bytes, of_all)
    # What the job runs with is decided before anything of it is measured.
    choice = job.choose_log()
    return StoreSizes(
        memory_bytes=kept.memory_bytes,
        least_bytes=least,
        expected_bytes=expected_store_bytes(models, job.shape, **how),
        log=kept.log.value,
        log_reason="" if choice is None else choice.reason,
        traffic=pod_traffic(models, job.shape, **how),
        problem=shortage(told, kept.memory_bytes, least, job.shape),
    )


def _redundancy(file: manifests.JobFile) -> int | None:
    redundancy = file.job.spec.redundancy
    return None if redundancy == "Auto" else redundancy


def _by_formula(file: manifests.JobFile) -> tuple[ModelSizes, ...]:
    shape, workload = file.job.shape, file.job.spec.workload
    return tuple(
        built_in_sizes(
            workload.entrypoint,
            workload.config,
            shape.ranks_per_stage,
            inner,
            accumulates=shape.micro_batches > 1,
        )
        for inner in range(shape.ranks_per_stage)
    )


def _measure(file: manifests.JobFile) -> tuple[ModelSizes, ...]:
    """Have a process with torch take a micro-batch through the user's blocks."""
    job = file.job
    question = MeasureQuestion(
        entrypoint=job.spec.workload.entrypoint,
        config=job.spec.workload.config,
        args=job.spec.workload.args,
        ranks_per_stage=job.shape.ranks_per_stage,
        accumulates=job.shape.micro_batches > 1,
        seed=job.shape.seed,
    )
    measured = torch_process.ask(
        "mainstay_train.compute.measure",
        question,
        manifests.search_path(file.path),
        Measurement,
        problem="the blocks cannot be measured here",
        takes="one block",
    )
    if measured.problem:
        raise UsageError(f"{file.path}: {measured.problem}")
    return measured.models
