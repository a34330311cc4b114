"""Remembers what blocks raised in a step that is checked: a device may have led to it.

A wrong number may make a block raise (an index that does not exist, an assertion of the user's)
before any check has seen it, and not only on the device that was wrong. So where checks are on, the
shard type is void at first, as if a check had found something late, and all compute it again. What
comes back is the user's mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mainstay_core.base.errors import MainstayError, brief
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import judge_raised_type
from mainstay_core.planning.program import Action, Op
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute.micro_batch import MicroBatch
from mainstay_train.model.workload import USER_ERRORS

logger = logging.getLogger(__name__)

BLOCKS = "blocks"
"""Stands in findings for a kernel: all that a pass of a stage's blocks calls."""


@dataclass(slots=True)
class _Raised:
    """An error that a type's blocks raised."""

    place: Place
    why: str
    is_alone: bool
    """Whether all that the blocks were given was computed on this device."""
    is_told: bool
    """Whether a check has found what led to it."""


class Doubts:
    """The errors that blocks raised in the step at hand, by shard type.

    Args:
        checks: of the trainer.
        num_stages: of the rank's chain.
        num_inner: ranks of its cell. Where there are several, the others wait in a collective when
            the blocks of one raise: that is doubted nowhere.
    """

    def __init__(self, checks: Checks, num_stages: int, num_inner: int) -> None:
        self._checks, self._num_stages = checks, num_stages
        self._num_inner, self._step, self._is_again = num_inner, -1, False
        self._raised: dict[int, _Raised] = {}
        self._before: frozenset[int] = frozenset()
        """Types of which an earlier program of the step has raised: of these it comes back."""

    def begin(self, step: int, *, is_again: bool) -> None:
        """Begin or go on with a step; what was raised in another one is forgotten.

        Args:
            step: whose types are computed.
            is_again: whether a replay computes it, which has digests to compare with.
        """
        self._is_again = is_again
        if step != self._step:
            self._step = step
            self._raised.clear()
        self._before = frozenset(self._raised)

    @contextmanager
    def over(self, action: Action, flow: MicroBatch) -> Iterator[None]:
        """Have a type be void whose blocks raise meanwhile, once, if that may come from a device.

        Args:
            action: that computes.
            flow: its micro-batch, which is given up then.

        Raises:
            UnreliableDeviceError: a check that waited says so.
        """
        try:
            yield
        except (*USER_ERRORS, RuntimeError) as error:
            if not self._is_doubtful(action.type, error):
                raise
            self._note(action, error)
            flow.give_up()

    def _is_doubtful(self, shard_type: int, error: Exception) -> bool:
        is_checked = self._checks.compares or self._checks.piggybacks
        is_first = shard_type not in self._before and not isinstance(error, MainstayError)
        return is_checked and is_first and self._num_inner == 1 and not self._is_again

    def _note(self, action: Action, error: Exception) -> None:
        shard_type = action.type
        phase = Phase.FORWARD if action.op is Op.FORWARD else Phase.BACKWARD
        self._checks.waiting.settle(shard_type)
        self._checks.judge()
        in_pass = Pass.FORWARD if phase is Phase.FORWARD else Pass.BACKWARD
        why = f"{type(error).__name__}: {brief(error)}"
        is_first = phase is Phase.FORWARD and action.visit == 0
        raised = _Raised(
            Place(self._step, phase, in_pass, shard_type, action.micro_batch),
            why,
            is_alone=self._num_stages == 1 or is_first,
            is_told=shard_type in self._checks.void,
        )
        self._raised.setdefault(shard_type, raised)  # what comes after it may come of it
        self._checks.void.add(shard_type)
        logger.warning(
            "step %d: type %d is computed again, as its blocks raised %s",
            self._step,
            shard_type,
            why,
        )

    def complete(self, shard_type: int) -> None:
        """A type is complete: tell what was raised before, and has not come back."""
        raised = self._raised.get(shard_type)
        if raised is None or raised.is_told or shard_type in self._checks.void:
            return
        raised.is_told = True
        self._checks.tell(
            raised.place,
            ordinal=0,
            operator=BLOCKS,
            output=0,
            num_elements=0,
            judgement=judge_raised_type(raised.why, alone=raised.is_alone),
        )
