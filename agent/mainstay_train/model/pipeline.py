"""Checks how a workload is cut into the stages of a job, and says what of it decides the bits."""

from __future__ import annotations

import logging

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.job.stages import tell_unlike_twins
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.model.outline import outline_of
from mainstay_train.model.workload import Workload

logger = logging.getLogger(__name__)


def identify(workload: Workload, shape: JobShape, inner: InnerMesh) -> dict[str, str]:
    """Return the entries of the fingerprint by which the pipeline decides the bits.

    In order it decides none. Swapped, a layer's input depends on the stage in which it lies.

    Args:
        workload: what is trained.
        shape: degrees of the job.
        inner: the first rank of a stage.

    Raises:
        InvalidSpecError: there are more stages than blocks, or twins cannot change places.
    """
    cuts = workload.stages(shape.stages, shape.cut)
    if shape.cut is Cut.EQUAL:
        costs = workload.costs()
        dearest, least = (
            max(sum(costs[i] for i in stage) for stage in stages)
            for stages in (cuts, workload.stages(shape.stages))
        )
        percent = 100 * (dearest / least - 1) if least else 0.0
        logger.info(
            "stages have equal numbers of layers: the dearest one costs %.1f %% more than in a "
            "balanced cut",
            percent,
        )
    if shape.order is Order.IN_ORDER:
        return {}
    outline = outline_of(workload, shape.stages, inner, shape.cut)
    problem = tell_unlike_twins([b.kind for stage in outline for b in stage], cuts)
    if problem:
        raise InvalidSpecError("spec.pipeline.order", f"is {shape.order.value}, but {problem}")
    sizes = ", ".join(str(len(stage)) for stage in cuts)
    return {"pipeline": f"{shape.order.value}, stages of {sizes} blocks"}
