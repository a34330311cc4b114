"""Says how long a step takes by its programs alone: every rank does its actions in order."""

from __future__ import annotations

from collections import deque

from mainstay_core.base.shape import Order
from mainstay_core.planning.program import Action, Op, compile_compute
from mainstay_core.planning.routes import Extent

SHARES = dict.fromkeys((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), 1 / 3)
"""Of a stage's time for a flow."""
SENT_BY = {Op.RECV_F: (Op.SEND_F, -1), Op.RECV_B: (Op.SEND_B, 1)}
"""What gives a receive its tensor, and at which visit beside."""


def played_s(order: Order, num_flows: int, num_stages: int, flow_s: float) -> float:
    """Return the seconds of a step in which layers take all the time, and transfers none.

    Args:
        order: in which flows pass the stages.
        num_flows: of the chain.
        num_stages: of the chain.
        flow_s: that a flow takes in the layers of one stage, forward and backward.
    """
    queues = [
        deque(compile_compute(range(num_flows), 1, stage, num_stages, order))
        for stage in range(num_stages)
    ]
    free_s = [0.0] * num_stages
    sent_s: dict[tuple[Op, int, int], float] = {}
    while any(queues):
        went_on = False
        for stage, queue in enumerate(queues):
            while queue and (ready_s := _ready_s(queue[0], sent_s)) is not None:
                action = queue.popleft()
                free_s[stage] = max(free_s[stage], ready_s) + _takes_s(action, flow_s)
                sent_s[action.op, action.type, action.visit] = free_s[stage]
                went_on = True
        assert went_on, "no order of work blocks"
    return max(free_s)


def _ready_s(action: Action, sent_s: dict[tuple[Op, int, int], float]) -> float | None:
    if action.op not in SENT_BY:
        return 0.0
    op, beside = SENT_BY[action.op]
    return sent_s.get((op, action.type, action.visit + beside))


def _takes_s(action: Action, flow_s: float) -> float:
    if action.extent in (Extent.EMBEDDING, Extent.HEAD):
        return 0.0
    return flow_s * SHARES.get(action.op, 0.0)
