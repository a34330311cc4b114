"""Compares what cells of a stage hold and send each other, beside what they execute twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mainstay_core.dmr.verdicts import Judgement, Remedy, Verdict
from mainstay_core.wire.ledger import FinalDigests
from mainstay_train.checks.checker import EXCHANGE, Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.exact.optimizer import REST_PARTS, Shared, StageState, StateTensor
from mainstay_train.exact.reduction import Reducer
from mainstay_train.sums import digests
from mainstay_train.sums.readout import Later


def due(state: StageState, checks: Checks, step: int) -> list[torch.Tensor]:
    """Return sums of the digest of what cells compare beside their masters in a step's vote.

    Args:
        state: of the cell.
        checks: say whether anything is compared.
        step: that is voted on.
    """
    return state.rest_sums(step % REST_PARTS) if checks.compares else []


def copied(reducer: Reducer, state: StageState, inner: InnerMesh) -> list[torch.Tensor]:
    """Return sums of the digests of the reduced gradients that all inner ranks of a cell hold."""
    gradients = state.layout.views(reducer.reduced)
    return [
        digests.tensor_sums(f"gradient:{param.name}", gradients[param.name])
        for block in state.layout.blocks
        for param in block.params
        if param.copy and inner.size > 1
    ]


def final(
    state: StageState, inner: InnerMesh, stage: int, version: int, masters: str, data: str
) -> FinalDigests:
    """Return what a rank adds to the digests of the model at the end of the job.

    Args:
        state: of the rank.
        inner: its place in its cell.
        stage: the cell's.
        version: steps applied.
        masters: what its masters add.
        data: digest of all samples consumed.
    """
    params = (
        StateTensor(param.name, "param", views[param.name], param.part, param.copy)
        for block in state.blocks
        for views in (block.layout.views(block.compute),)
        for param in block.layout.params
    )
    moments = (tensor for tensor in state.state_tensors() if tensor.kind != "master")
    return FinalDigests(
        stage=stage,
        inner=inner.index,
        version=version,
        params=Shared.of(params).counted(inner).hex(),
        masters=masters,
        optimizer=Shared.of(moments).counted(inner).hex(),
        data=data,
    )


def tell_arrived(
    checks: Checks, step: int, members: Sequence[int], differing: Sequence[Later]
) -> str:
    """Tell of what came into a reduction otherwise than it was sent.

    Args:
        checks: where it is told.
        step: whose gradient was reduced.
        members: that took part, in their order.
        differing: see :attr:`Reducer.differing`, fetched.

    Returns:
        The problem of the vote in one sentence; empty if there is none.
    """
    counts = [num for turns in differing for num in turns().tolist()]
    names = [f"member {m}" for m, num in zip(members, counts, strict=False) if num]
    if not names:
        return ""
    problem = f"what came from {', '.join(names)} into the reduction is not what was sent"
    checks.tell(
        Place(step, Phase.REDUCE),
        ordinal=0,
        operator=EXCHANGE,
        output=0,
        num_elements=0,
        judgement=Judgement(verdict=Verdict.WIRE, remedy=Remedy.REDUCE_AGAIN, reason=problem),
    )
    return problem
