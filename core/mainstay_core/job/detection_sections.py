"""Defines the section of a TrainingJob that says how faults and wrong results are found.

The text under a field is its description in ``kubectl explain``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from mainstay_core.dmr.settings import (
    MAX_PROFILE_STEPS,
    PROFILE_STEPS,
    WAITING_BYTES,
    PlanName,
)
from mainstay_core.job.sections import Section
from mainstay_core.job.types import CheckPlan, QuantityOrAuto, Seconds, read_quantity


class Dmr(Section):
    """Checks by re-execution (dual modular redundancy): operators are executed twice and their bits
    compared, so that a device that computes a wrong number is found. It never changes the bits of
    the result.
    """

    mode: Literal["Off", "Piggyback", "Full"] = "Off"
    """Off: nothing is executed twice. Piggyback: the recompute of a forward is compared with it,
    which costs little and covers forward and recompute alone. Needs runtime.recompute. Full: each
    operator whose result can reach a gradient or the state is executed twice. A wrong value is
    repaired before anybody reads it; in Piggyback a shard type in which a wrong forward was used
    is computed again. Needs runtime.compile Off, and a model that comes as blocks."""
    plan: CheckPlan = "Naive"
    """When the second execution runs in mode Full. Naive: at once, after the first one; it doubles
    the computation. Dynamic: while the rank waits for another stage or for the reduction, as far as
    memory allows, on a CPU; a shard type in which a value was used that is found wrong then is
    computed again. Auto: likewise, by a plan that each trainer makes of its first steps; recomputes
    (runtime.recompute) count as second executions of forwards. A path: by a plan that mainstay dmr
    plan has written, a file that all pods see; {stage} in it stands for the stage's number, and
    {way} for the name of a micro-batch's way through the stage: an end of a pipeline with order
    Swapped has two."""
    profile_steps: Annotated[int, pydantic.Field(ge=1, le=MAX_PROFILE_STEPS)] = PROFILE_STEPS
    """Steps of a trainer's stage from which it makes its plan, or verifies that of a file. All is
    checked at once in them, and in the one before, in which constants are made."""
    memory: QuantityOrAuto = "Auto"
    """What checks that wait retain at most in a rank, with another plan than Naive. Auto is
    256Mi."""

    @property
    def plan_name(self) -> PlanName:
        """``plan``, with File in place of a path."""
        return PlanName.FILE if self.plan.startswith("/") else PlanName(self.plan)

    @property
    def waiting_bytes(self) -> int:
        """``memory`` in bytes; 0 where no check waits."""
        if self.plan == "Naive":
            return 0
        if self.memory == "Auto":
            return WAITING_BYTES
        return read_quantity("spec.detection.dmr.memory", self.memory)


class Witness(Section):
    """Checks by another device: in some steps a second replica computes one shard type of a
    replica, too. What both tell of it is compared, from what crosses the stages to the gradient.
    A device that is wrong in the same way each time is seen by nothing else. It never changes the
    bits of the result.
    """

    every_steps: Annotated[int, pydantic.Field(ge=0, le=1_000_000)] = 0
    """In each step whose number is a multiple of it a type is computed twice; 0: in none. Each
    replica is witnessed by each other in turn. Needs two replicas; in steps with fewer nothing is
    computed twice. Which of two devices that differ is wrong, a third one says: another replica,
    else a follower or a spare. Without one the step waits for it."""


class Detection(Section):
    """When silence counts as a fault, and how wrong results are found. Failures that are noticed do
    not wait for any of these times.
    """

    hang_seconds: Seconds = 300
    """A rank that runs (does not wait for others) without any progress this long is killed."""
    heartbeat_seconds: Seconds = 1
    """Interval of a pod's heartbeat."""
    heartbeat_timeout_seconds: Seconds = 15
    """A pod this far behind the job's newest heartbeat counts as gone. At least three times
    heartbeatSeconds."""
    dmr: Dmr = Dmr()
    witness: Witness = Witness()
