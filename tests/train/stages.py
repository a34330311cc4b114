"""The state of one stage, outside of any trainer."""

from mainstay_core.base.shape import Cut
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model.workload import Workload


def build_stage(model: Workload, stages: int, stage: int, cut: Cut = Cut.BALANCED) -> StageState:
    """Return blocks and state of one stage out of ``stages``."""
    return StageState(model.build(model.stages(stages, cut)[stage]), model.optimizer)
