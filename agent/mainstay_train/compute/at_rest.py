"""Puts the wrong bits of faults into the state of a stage at rest, and digests that state."""

from __future__ import annotations

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.dmr.flips import StatePart, Where
from mainstay_core.faults.points import FaultPoint
from mainstay_core.planning.program import Op
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.optimizer import StageState
from mainstay_train.kernels import bits

BEGINS = (Op.RECV_F, Op.FORWARD, Op.REDUCE)
"""Actions with which a step of a rank may begin. Nothing computes with its state then."""


def phase_of(fault: FaultPoint) -> Phase | None:
    """Return the phase in which a flip is put in; None: nothing of a step computes there.

    What hits the state is put in before the first one.
    """
    if fault.flip is not None and fault.flip.where is Where.STATE:
        return Phase.FORWARD
    return None if fault.phase is None else Phase.of(fault.phase)


def put_flips(checks: Checks, state: StageState) -> None:
    """Put in what the step at hand has ordered, before the step computes.

    Args:
        checks: have the orders.
        state: is changed. No thread may compute with it.
    """
    if not checks.awaits(Where.STATE):
        return
    for number in range(len(state.blocks)):
        place = Place(checks.step, Phase.FORWARD, block=number)
        for part in StatePart:
            if tensors := _tensors_of(state, number, part):
                for flip in checks.take(Where.STATE, place, part.value):
                    bits.flip_bit(tensors[flip.output % len(tensors)], flip.element, flip.bit)


def _tensors_of(state: StageState, number: int, part: StatePart) -> list[torch.Tensor]:
    """Return the flat tensors of a part of a block's state."""
    block = state.blocks[number]
    if part is StatePart.MOMENTS:
        return [f.tensor for f in state.flats() if f.name == block.name and f.kind != "master"]
    return [block.masters if part is StatePart.MASTERS else block.compute]


def digest(engine: Engine, version: int, masters: str) -> str:
    """Return a digest of a rank's whole state beside the masters."""
    final = engine.final_digests(version, masters, "")
    return (Digest.parse(final.params) + Digest.parse(final.optimizer)).hex()
