"""Says in sentences what the ranks of a job hold and send, as far as its specification tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count, show_bytes
from mainstay_core.job import model_sizes
from mainstay_core.job.config import BUCKET_BYTES
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.rank_sizes import Made, RankSizes, even_shares, rank_sizes

MEASURED_BY = "`mainstay local run FILE --dry-run`"
"""The command that computes or measures the sizes of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSummary:
    """A job's sizes in sentences, as far as they are known."""

    message: str
    """The rank that holds the most, or why nothing is known."""
    ranks: tuple[str, ...] = ()
    """A sentence for each rank of a replica that differs; none where nothing is known."""
    is_wrong: bool = False
    """Whether nothing is known since the configuration cannot be used."""


def summarize_sizes(
    entrypoint: str,
    config: Mapping[str, Any],
    shape: JobShape,
    *,
    recompute: float,
    bucket_bytes: int = BUCKET_BYTES,
    guards: int = 0,
    made: Made | None = None,
) -> SizeSummary:
    """Return what the ranks of a job hold and send, by formulas; no code of a user runs here.

    With fewer replicas than lanes partials and what is sent are bounds.

    Args:
        entrypoint: of the workload.
        config: of the workload.
        shape: degrees of the job.
        recompute: share of a stage's blocks whose forwards run again in the backward.
        bucket_bytes: what is reduced at a time.
        guards: of each end of the pipeline.
        made: how stages may be made anew; None: they may not.
    """
    if entrypoint not in model_sizes.BUILT_IN:
        return SizeSummary(
            message=f"what a rank holds and sends is not known here, as the model is that of "
            f"{entrypoint}; {MEASURED_BY} measures it"
        )
    try:
        found = _ranks(
            entrypoint,
            config,
            shape,
            recompute=recompute,
            bucket_bytes=bucket_bytes,
            guards=guards,
            made=made,
        )
    except InvalidSpecError as error:
        return SizeSummary(message=f"what a rank holds is not known: {error}", is_wrong=True)
    if not found:
        num_blocks = model_sizes.num_blocks(config)
        return SizeSummary(
            message=f"what a rank holds and sends is not computed here, as {num_blocks} blocks "
            f"would be cut into {count(shape.stages, 'stage')}; {MEASURED_BY} does"
        )
    most = max(found, key=lambda rank: rank.memory_bytes)
    positions = count(len(shape.positions), "rank") + " of a replica"
    return SizeSummary(
        message=f"of the {positions} the one that holds the most: {_describe(most)}",
        ranks=tuple(map(_describe, found)),
    )


def _ranks(
    entrypoint: str,
    config: Mapping[str, Any],
    shape: JobShape,
    *,
    recompute: float,
    bucket_bytes: int,
    guards: int,
    made: Made | None,
) -> list[RankSizes]:
    """Return sizes of the first replica's ranks; none where the model is too deep to be cut here.

    Of a stage's ranks the first and the last are told: the others lie between them.
    """
    model_sizes.check_config(entrypoint, config)
    num_blocks = model_sizes.num_blocks(config)
    if shape.stages * num_blocks**2 > model_sizes.MAX_CUTS:
        return []
    shares, accumulates = even_shares(shape), shape.micro_batches > 1
    ranks = [
        rank
        for inner in sorted({0, shape.ranks_per_stage - 1})
        for rank in rank_sizes(
            built_in_sizes(
                entrypoint, config, shape.ranks_per_stage, inner, accumulates=accumulates
            ),
            shape,
            shares,
            recompute=recompute,
            bucket_bytes=bucket_bytes,
            replicas=(0,),
            guards=guards,
            made=made,
        )
    ]
    return sorted(ranks, key=lambda rank: (rank.stage, rank.inner))


def _describe(rank: RankSizes) -> str:
    parts = {
        "copy": rank.parameters_bytes,
        "masters": rank.masters_bytes,
        "moments": rank.moments_bytes,
        "gradients": rank.gradients_bytes,
        "partials": rank.partials_bytes,
        "reduction": rank.reduction_bytes,
        "activations": rank.activations_bytes,
        "guarded": rank.guarded_bytes,
    }
    shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
    guard = rank.sent_guarded_bytes
    to_guard = f", to its guard {show_bytes(guard)}" if guard else ""
    making = rank.making_bytes
    to_be_made = f"; to be made anew it copies {show_bytes(making)} beside its state"
    to_be_made = to_be_made if making else ""
    return (
        f"stage {rank.stage}, inner {rank.inner}: {rank.num_parameters:,} parameters, memory "
        f"{show_bytes(rank.memory_bytes)} ({shown}); sent in a step {show_bytes(rank.sent_bytes)} "
        f"(to stages {show_bytes(rank.sent_pipeline_bytes)}, to cells "
        f"{show_bytes(rank.sent_reduction_bytes)}, in the cell "
        f"{show_bytes(rank.sent_inner_bytes)}{to_guard}){to_be_made}"
    )
