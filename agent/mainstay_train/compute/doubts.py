"""Remembers what blocks raised in a step that is checked: a device may have led to it.

A wrong number may make a block raise (an index that does not exist, an assertion of the user's)
before any check has seen it, and not only on the device that was wrong. So where checks are on, the
shard type is void at first, as if a check had found something late, and all compute it again. What
comes back is the user's mistake.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mainstay_core.base.errors import MainstayError, brief
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import judge_raised_type
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place

logger = logging.getLogger(__name__)

BLOCKS = "blocks"
"""Stands in findings for a kernel: all that a pass of a stage's blocks calls."""


@dataclass(slots=True)
class _Raised:
    """What a type's blocks raised."""

    place: Place
    why: str
    is_told: bool
    """Whether a check has found what led to it."""


class Doubts:
    """What blocks raised in the step at hand, by shard type.

    Args:
        checks: of the trainer.
        stage: of this rank.
        num_stages: of its chain.
    """

    def __init__(self, checks: Checks, stage: int, num_stages: int) -> None:
        self._checks, self._stage, self._num_stages = checks, stage, num_stages
        self._step = -1
        self._raised: dict[int, _Raised] = {}

    def begin_step(self, step: int) -> None:
        """Forget what was raised in another step."""
        if step != self._step:
            self._step = step
            self._raised.clear()

    def is_doubtful(self, shard_type: int, error: Exception) -> bool:
        """Return whether a device may have led to an error: checks are on, and it is the first."""
        is_checked = self._checks.compares or self._checks.piggybacks
        return (
            is_checked and shard_type not in self._raised and not isinstance(error, MainstayError)
        )

    def note(self, phase: Phase, shard_type: int, micro_batch: int, error: Exception) -> None:
        """Have a type be void since its blocks raised something.

        Raises:
            UnreliableDeviceError: a check that waited says so.
        """
        self._checks.waiting.settle(shard_type)
        in_pass = Pass.FORWARD if phase is Phase.FORWARD else Pass.BACKWARD
        why = f"{type(error).__name__}: {brief(error)}"
        self._raised[shard_type] = _Raised(
            Place(self._step, phase, in_pass, shard_type, micro_batch),
            why,
            is_told=shard_type in self._checks.void,
        )
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
            judgement=judge_raised_type(raised.why, alone=self._is_alone(raised.place.phase)),
        )

    def _is_alone(self, phase: Phase) -> bool:
        """Return whether all that blocks are given in a phase was computed on this device."""
        return self._num_stages == 1 or (phase is Phase.FORWARD and self._stage == 0)
