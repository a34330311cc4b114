"""Names what a job wants of checks by re-execution: which operators are executed twice."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from mainstay_core.base.bounds import Count, Text
from mainstay_core.base.words import count


class Mode(enum.StrEnum):
    """The operators that are executed a second time."""

    OFF = "Off"
    """None."""
    PIGGYBACK = "Piggyback"
    """Those of forward and recompute: each is the second execution of the other. The last block,
    which has no recompute, is executed twice at once."""
    FULL = "Full"
    """All whose results can reach a gradient or the state, each at once (the plan Naive)."""


class PlanName(enum.StrEnum):
    """The moments at which second executions run in mode Full."""

    NAIVE = "Naive"
    """At once."""
    DYNAMIC = "Dynamic"
    """In waits for other stages, as the dynamic planner decides while the step runs."""
    AUTO = "Auto"
    """As the static planner decides from a profile of the run's first steps."""
    FILE = "File"
    """As a plan in a file says."""


PLANNED = (PlanName.AUTO, PlanName.FILE)
"""Plans that are made beforehand, from a profile."""
STAGE = "{stage}"
"""Stands in the path of a plan's file for the number of the stage."""
WAY = "{way}"
"""Stands there for the name of a micro-batch's way through the stage."""
PROFILE_STEPS = 3
"""Steps that a profile is made from, unless the job says it: a median of fewer is one of them."""
MAX_PROFILE_STEPS = 100
"""More of them only delay the plan."""


WAITING_BYTES = 256 << 20
"""What checks that wait retain at most, unless the job says it."""
MAX_WAITING_BYTES = 2**53
"""More no job may say: no device has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """The checks of a job. They may change while the job runs: a plan says which are in force.

    Bits never depend on it. But all members of a quorum follow the same rules, as they tell each
    other digests by them.
    """

    mode: Mode = Mode.OFF
    plan: PlanName = PlanName.NAIVE
    plan_file: Text = ""
    """Path of the plan; empty unless the plan is File."""
    profile_steps: Count = 0
    memory_bytes: Count = 0
    """What checks that wait may retain in a rank."""
    witness_every_steps: Count = 0
    """In each step that is a multiple of it a second chain computes a type; 0: in none."""

    def describe(self) -> str:
        """Return the rules for people: ``detection.dmr Full by plan Auto, no witness``."""
        by = f" by plan {self.plan_file or self.plan.value}" if self.mode is Mode.FULL else ""
        every = self.witness_every_steps
        witness = f"a witness every {count(every, 'step')}" if every else "no witness"
        return f"detection.dmr {self.mode.value}{by}, {witness}"


_COVERAGE = {
    Mode.OFF: "",
    Mode.PIGGYBACK: "P 100 % of forward and recompute (naive in the last block); "
    "none of gradients, sums, reduction, apply and batch",
    Mode.FULL: "naive 100 %",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChecks:
    """The checks of a stage that was planned, as a trainer of it told last."""

    stage: int
    plan: str
    """The plan that is carried out: Auto, File, or Naive where none is."""
    shares: str
    """How operator time is checked, by method."""
    reason: str
    """Why, for people."""

    def describe(self) -> str:
        """Return it in short: a plan that could not be made is told with the reason."""
        why = f" ({self.reason})" if self.plan == PlanName.NAIVE else ""
        return f"stage {self.stage}: {self.shares}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """The devices with which a witness has agreed in the last round.

    A round is as many steps as it takes until each replica was witnessed once.
    """

    num_clean: int
    num_devices: int
    """All that have a rank."""


def describe_coverage(
    mode: Mode,
    plan: PlanName = PlanName.NAIVE,
    planned: Sequence[StageChecks] = (),
    witness_every_steps: int = 0,
    witnessed: Witnessed | None = None,
    *,
    is_loop: bool = False,
) -> str:
    """Return what is checked, by method, and what is not, by name; empty: nothing is.

    What is executed twice on one device finds faults that do not come back, and a witness both
    kinds.

    Args:
        mode: of the job.
        plan: of the job.
        planned: what trainers have told of their stages, in order.
        witness_every_steps: between steps with a witness; 0: there is none.
        witnessed: what the last round of witnesses came to; None: it is not known.
        is_loop: whether the job is a training loop of the user's own.
    """
    every = witness_every_steps
    executed = (
        describe_executions(mode, plan, planned),
        _describe_basis(mode, plan, planned, is_loop=is_loop),
    )
    twice, witness = "; ".join(filter(None, executed)), _describe_witness(every, witnessed)
    told = ""
    if twice:
        told = f"transient faults: {twice}; deterministic ones: {witness or 'nothing'}"
    elif witness:
        told = f"transient and deterministic faults: {witness}"
    missing = uncovered(mode, witness_every_steps=every, is_loop=is_loop)
    return f"{told}; not covered: {', '.join(missing)}" if told else ""


def _describe_witness(every_steps: int, witnessed: Witnessed | None) -> str:
    if not every_steps:
        return ""
    when = "each step" if every_steps == 1 else f"one of {every_steps} steps"
    told = f"a witness computes a shard type again in {when}"
    if witnessed is None:
        return told
    devices = count(witnessed.num_devices, "device")
    return f"{told}, {witnessed.num_clean} of {devices} witnessed in the last round"


def _describe_basis(
    mode: Mode, plan: PlanName, planned: Sequence[StageChecks], *, is_loop: bool
) -> str:
    """Return what the shares are shares of."""
    if mode is not Mode.FULL:
        return ""  # that of Piggyback says it
    if is_loop:
        return "works are compared by gradient and loss, all else by kernels"
    if plan in PLANNED and planned:
        return (
            "shares are of the operator time of a micro-batch's passes; sums, norms, apply, the "
            "cast and the batch are executed twice at once besides"
        )
    return "shares are of all that torch computes in a step"


REPEATED = "faults that repeat themselves on a device"
BUT_WITNESSED = "but for the shard types that a witness compares"
UNWITNESSED = "all shard types that no witness compares"
SUMS = "sums of types and of cells"
APPLIED = "the cast and moments"
BETWEEN_STAGES = "what travels between stages"
AT_REST = "the state at rest until a vote compares it"
HOST = "what the host computes"
IN_PLACE = "collectives in place"
UNSEEN = "what torch's dispatcher does not show"


def uncovered(
    mode: Mode, *, witness_every_steps: int = 0, is_loop: bool = False
) -> tuple[str, ...]:
    """Return what neither checks nor a witness would find, by name.

    Piggyback's own words say which operators it leaves out.

    Args:
        mode: of the job.
        witness_every_steps: between steps with a witness; 0: there is none.
        is_loop: whether the job is a training loop of the user's own: it has one stage of one rank.
    """
    if mode is Mode.OFF:
        return (UNWITNESSED, SUMS, APPLIED, AT_REST)
    but = f", {BUT_WITNESSED}" if witness_every_steps else ""
    within = () if is_loop else (BETWEEN_STAGES, IN_PLACE, UNSEEN)
    return (REPEATED + but, *within, AT_REST, HOST)


def describe_executions(
    mode: Mode, plan: PlanName = PlanName.NAIVE, planned: Sequence[StageChecks] = ()
) -> str:
    """Return the share of operator time that is executed twice, by method; empty: nothing is.

    Args:
        mode: of the job.
        plan: of the job.
        planned: what trainers have told of their stages, in order.
    """
    if mode is Mode.FULL and plan in PLANNED and planned:
        return "; ".join(checks.describe() for checks in planned)
    if mode is Mode.FULL and plan is PlanName.DYNAMIC:
        return "inter and naive together 100 %"
    if mode is Mode.FULL and plan in PLANNED:
        return "naive 100 % until the first steps are profiled, then by plan"
    return _COVERAGE[mode]
