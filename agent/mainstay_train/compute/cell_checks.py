"""Has the ranks of a cell check alike what they execute together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mainstay_core.planning.program import Action, Op
from mainstay_core.planning.routes import Way
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.planned import Flow
from mainstay_train.comm.mesh import InnerMesh, tell_all
from mainstay_train.model.blocks import Block


class CellChecks:
    """The checks of a stage's recomputes, as the ranks of its cell agree on them.

    Args:
        checks: of this rank.
        blocks: of the stage.
        inner: this rank's place in its cell.
    """

    def __init__(self, checks: Checks, blocks: Sequence[Block], inner: InnerMesh) -> None:
        self._checks, self._blocks, self._inner = checks, blocks, inner
        self._unnoted: set[int] = set()
        """Blocks whose next recompute is not compared with its forward: some rank of the cell has
        never called one of its own, and must execute that twice."""

    def begin(self, program: Sequence[Action], *, is_again: bool) -> None:
        """Say that a program begins; the ranks of a cell do so together.

        Args:
            program: of the stage.
            is_again: whether it computes a step again that was committed.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
            RuntimeError: the cell's group has ended.
        """
        firsts = {} if is_again else firsts_of(program)
        self._unnoted.clear()
        if self._inner.size > 1 and any(action.op is Op.FORWARD for action in program):
            is_new = any(block.is_new for block in self._blocks)
            if self._checks.align(is_new, partial(tell_all, inner=self._inner)):
                self._unnoted.update(range(len(self._blocks)))
        self._checks.begin_program(firsts)

    def notes(self, number: int) -> bool:
        """Return whether the next forward of a block is noted, to be compared with its recompute.

        Args:
            number: of the block in its stage.
        """
        is_noted = self._checks.notes(number) and number not in self._unnoted
        self._unnoted.discard(number)
        return is_noted


def firsts_of(program: Sequence[Action]) -> dict[Way, Flow]:
    """Return the first micro-batch of each way through a stage."""
    ways: dict[Flow, Way] = {}
    for action in program:
        if action.op is Op.FORWARD:
            flow = action.type, action.micro_batch
            ways[flow] = (*ways.get(flow, ()), action.extent)
    firsts: dict[Way, Flow] = {}
    for flow, way in ways.items():
        firsts.setdefault(way, flow)
    return firsts
