"""Says which receives of a rank tell that its neighbours have taken what it sent.

Some transports do not say that a send is over before somebody waits for it, and a wait might block.
But a neighbour runs a program, too, and that is known: whatever it had received before it began to
send something has been taken when that arrives. The receive is the *receipt* of the sends before.
A wait for these does not block any more, and their tensors can go before the step ends.

The sends of a stage's last backwards have no receipt, as nothing comes after them. Their number
follows from the stages alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from mainstay_core.base.shape import Order
from mainstay_core.planning.program import (
    ANSWER,
    BESIDE,
    Action,
    Op,
    Receive,
    compile_compute,
    write_1f1b,
)

Receipts = Mapping[Receive, tuple[Action, ...]]
"""By a receive of a rank: the sends of the rank that it is the receipt of."""

_SENT_AS = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
_RECEIVED_AS = {send: receive for receive, send in _SENT_AS.items()}


@lru_cache(maxsize=64)
def receipts_of(
    shard_types: tuple[int, ...], micro_batches: int, stage: int, num_stages: int, order: Order
) -> Receipts:
    """Return the receipts of a stage in the compute part of a step.

    Cached: as a rule a chain computes the same types in every step.

    Args:
        shard_types: types of the rank's chain, in order.
        micro_batches: micro-batches per type.
        stage: the rank's stage, 0..num_stages-1.
        num_stages: stages of the chain.
        order: in which micro-batches pass the stages.
    """
    own = compile_compute(shard_types, micro_batches, stage, num_stages, order)
    if order is Order.IN_ORDER:
        # It exchanges with the two beside it alone, whose programs nobody asks for again.
        beside = [each for each in (stage - 1, stage + 1) if 0 <= each < num_stages]
        others = {e: write_1f1b(shard_types, micro_batches, e, num_stages) for e in beside}
    else:
        others = {
            each: compile_compute(shard_types, micro_batches, each, num_stages, order)
            for each in range(num_stages)
        }
    programs = {**others, stage: own}
    return find_receipts(programs, stage)


def find_receipts(programs: Mapping[int, Sequence[Action]], stage: int) -> Receipts:
    """Return the receipts of a stage, by what every stage does that it exchanges with.

    Complexity: O(n) in the actions of these stages together.

    Args:
        programs: by stage, each of which runs its actions one after the other.
        stage: the one that gets the receipts.
    """
    sends = {_place(action): action for action in programs[stage] if action.op in ANSWER}
    found: dict[Receive, tuple[Action, ...]] = {}
    for peer, program in programs.items():
        taken: list[Action] = []
        for action in program:
            if action.peer != stage:
                continue
            flow, visit = (action.type, action.micro_batch), action.visit + BESIDE[action.op]
            if action.op in _SENT_AS:
                taken.append(sends[_SENT_AS[action.op], *flow, visit])
            elif taken:
                found[Receive(_RECEIVED_AS[action.op], *flow, visit, peer)] = tuple(taken)
                taken = []
    return found


def _place(action: Action) -> tuple[Op, int, int, int]:
    return action.op, action.type, action.micro_batch, action.visit
