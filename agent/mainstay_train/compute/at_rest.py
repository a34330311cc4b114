"""Puts the wrong bits of faults into the state of a stage at rest, and digests that state."""

from __future__ import annotations

import logging

import torch

from mainstay_core.base.digest import Digest
from mainstay_core.dmr.flips import Flip, StatePart, Where
from mainstay_core.faults.points import FaultPoint
from mainstay_core.planning.program import Op
from mainstay_train.checks import bits
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.optimizer import StageState

logger = logging.getLogger(__name__)

BEGINS = (Op.RECV_F, Op.FORWARD, Op.REDUCE)
"""Actions with which a step of a rank may begin. Nothing computes with its state then."""
STATE = "state"
"""Stands for a kernel: the state in memory."""


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
    place = Place(checks.step, Phase.FORWARD)
    for flip in checks.take(Where.STATE, place, STATE):
        tensors = _meant(state, flip)
        if not tensors:
            part = flip.part.value if flip.part else STATE
            logger.warning(
                "a flip of the state was not put in: the stage has %d blocks, and number %d has "
                "no %s",
                len(state.blocks),
                flip.block or 0,
                part,
            )
            continue
        bits.flip_bit(tensors[flip.output % len(tensors)], flip.element, flip.bit)


def _meant(state: StageState, flip: Flip) -> list[torch.Tensor]:
    """Return the flat tensors of a block that a flip may mean."""
    number = flip.block or 0
    if number >= len(state.blocks):
        return []
    block = state.blocks[number]
    if flip.part is StatePart.MASTERS:
        return [block.masters]
    if flip.part is not StatePart.MOMENTS:
        return [block.compute]
    return [f.tensor for f in state.flats() if f.name == block.name and f.kind != "master"]


def digest(engine: Engine, version: int, masters: str) -> str:
    """Return a digest of a rank's whole state beside the masters."""
    final = engine.final_digests(version, masters, "")
    return (Digest.parse(final.params) + Digest.parse(final.optimizer)).hex()
