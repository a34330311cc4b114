"""Reads a FAULTS.yaml: what to break, where and when (docs/faults.md).

It is a list of ``{at, target, action}``. A target names the rank in the quorum in force when the
fault fires (design 13.8). ``at`` names a step and an action of its program, or a place in the
recovery from a fault further up in the list. A fault that can never fire is refused, with the
reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import quote
from mainstay_core.faults.fields import choice, fields, integer, number, text
from mainstay_core.faults.flips import parse_flip
from mainstay_core.faults.points import (
    OF_CELLS,
    OF_SNAPSHOTS,
    PHASES,
    PROCESS_ACTIONS,
    RANK_ACTIONS,
    SENDS_BACK,
    SENDS_ON,
    SPARE_ACTIONS,
    During,
    FaultAction,
    FaultPoint,
)

PHASE_NAMES = (
    *PHASES,
    *(op for ops in PHASES.values() for op in ops),
    *SENDS_ON,
    *SENDS_BACK,
)
"""Names of phases: the aliases, then the program actions for which they stand."""
ENTRY = ("at", "target", "action", "id", "forSeconds", "factor", "delayMs", "steps", "flip")
AT = ("step", "phase", "delayMs", "during", "of", "after", "with")
TARGET = ("replica", "stage", "inner", "spare", "process")
RELATIONS = ("of", "after", "with")
NO_SNAPSHOTS = "the job keeps no snapshots (spec.snapshots.enabled)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job against which a faults file is checked."""

    shape: JobShape
    num_spares: int
    known: Mapping[str, FaultPoint] = field(default_factory=dict)
    """Faults that the job has already. New ones may refer to them."""
    at_step: int | None = None
    """Number of committed steps of a running job; None before it starts."""
    local: bool = True
    """Whether the job is a local run. Nobody breaks the control plane of a cluster."""
    has_snapshots: bool = False
    """Whether its state is kept in the memory of pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    replica: int | None = None
    stage: int | None = None
    inner: int = 0
    spare: int | None = None
    process: str | None = None

    @property
    def what(self) -> str:
        if self.process is not None:
            return f"the process {self.process}"
        return "a rank" if self.spare is None else "a spare"

    @property
    def actions(self) -> tuple[FaultAction, ...]:
        if self.process is not None:
            return PROCESS_ACTIONS[self.process]
        return RANK_ACTIONS if self.spare is None else SPARE_ACTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class _At:
    step: int
    phase: str | None
    delay_ms: float
    soon: bool
    during: During | None
    of: str | None
    after: str | None
    beside: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    for_s: float | None = None
    slow_ms: float = 0.0
    factor: float = 1.0
    num_steps: int = 1


def parse_faults(
    data: object,
    shape: JobShape,
    num_spares: int,
    name: str = "faults",
    *,
    has_snapshots: bool = False,
) -> tuple[FaultPoint, ...]:
    """Return the faults of a file, in its order, checked against the job.

    Args:
        data: loaded YAML: a list of entries, or nothing.
        shape: of the job the faults are for; a target outside it would never fire.
        num_spares: standby pods of the job.
        name: how to call the list in messages.
        has_snapshots: whether the job's state is kept in the memory of pods.

    Raises:
        InvalidSpecError: names entry and field, and says what would be right.
    """
    job = Job(shape=shape, num_spares=num_spares, has_snapshots=has_snapshots)
    return parse_more(data, job, name)


def parse_more(data: object, job: Job, name: str = "faults") -> tuple[FaultPoint, ...]:
    """Return faults for a job that may have some already, and may be running.

    Raises:
        InvalidSpecError: names entry and field, and says what would be right.
    """
    if data is None:
        return ()
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        raise InvalidSpecError(name, f"expected a list of faults, found {type(data).__name__}")
    known = dict(job.known)
    entry_of: dict[str, int] = {}
    faults = []
    for index, entry in enumerate(data):
        path = f"{name}[{index}]"
        kind = "fault" if job.at_step is None else "injected"
        default_id = f"{kind}-{len(job.known) + index}"
        fault = _parse_fault(entry, default_id, path, job, known)
        if fault.id in known:
            where = f"entry {entry_of[fault.id]}" if fault.id in entry_of else "the job"
            raise InvalidSpecError(f"{path}.id", f"is {fault.id!r}, which {where} has already")
        known[fault.id], entry_of[fault.id] = fault, index
        faults.append(fault)
    return tuple(faults)


def _parse_fault(
    data: object, default_id: str, path: str, job: Job, known: Mapping[str, FaultPoint]
) -> FaultPoint:
    entry = fields(data, path, ENTRY)
    needed = ("target", "action") if job.at_step is not None else ("at", "target", "action")
    for key in needed:
        if key not in entry:
            raise InvalidSpecError(f"{path}.{key}", "is missing")
    target = _parse_target(entry["target"], f"{path}.target", job)
    action = FaultAction(
        choice(entry["action"], f"{path}.action", [a.value for a in target.actions], target.what)
    )
    effect = _parse_effect(entry, path, action, target)
    at = _parse_at(entry.get("at", {}), f"{path}.at", job, known, target)
    if action is FaultAction.SLOW and at.delay_ms:
        raise InvalidSpecError(
            f"{path}.at.delayMs",
            "a rank is slow from the action on; how slow is delayMs beside action",
        )
    if action is FaultAction.FLIP:
        _check_place_of_flip(at, f"{path}.at")
        flip = parse_flip(
            entry.get("flip"),
            f"{path}.flip",
            at.phase,
            job.shape,
            at=f"{path}.at",
            stage=target.stage,
        )
    elif "flip" in entry:
        raise InvalidSpecError(f"{path}.flip", f"means nothing to {action}, only to flip")
    else:
        flip = None
    return FaultPoint(
        flip=flip,
        id=text(entry.get("id", default_id), f"{path}.id", "that names the fault"),
        action=action,
        **{name: getattr(at, name) for name in _At.__slots__},
        **{name: getattr(target, name) for name in _Target.__slots__},
        **{name: getattr(effect, name) for name in _Effect.__slots__},
    )


def _check_place_of_flip(at: _At, path: str) -> None:
    if at.during is not None:
        raise InvalidSpecError(
            f"{path}.during", "a wrong bit is put into a step; say when by step, after or with"
        )
    if at.delay_ms:
        raise InvalidSpecError(
            f"{path}.delayMs", "means nothing to flip: the operator says when; leave it out"
        )


def _parse_target(data: object, path: str, job: Job) -> _Target:
    target, shape = fields(data, path, TARGET), job.shape
    kinds = [key for key in ("spare", "process") if key in target]
    if kinds and len(target) > 1:
        others = " and ".join(sorted(set(target) - {kinds[0]}))
        raise InvalidSpecError(path, f"names a {kinds[0]} and {others}; use either one")
    if "process" in target:
        if not job.local:
            raise InvalidSpecError(
                f"{path}.process",
                "is for local runs: nobody carries out faults on the api or Redis of a cluster",
            )
        return _Target(process=choice(target["process"], f"{path}.process", [*PROCESS_ACTIONS]))
    if "spare" in target:
        if job.num_spares < 1:
            raise InvalidSpecError(f"{path}.spare", "the job has no spares (spec.spares.replicas)")
        spare = integer(target["spare"], f"{path}.spare", job.num_spares, "the spares")
        return _Target(spare=spare)
    for key in ("replica", "stage"):
        if key not in target:
            raise InvalidSpecError(
                f"{path}.{key}", "is missing; a target is {replica, stage}, {spare} or {process}"
            )
    return _Target(
        # Replicas may be as many as lanes, and any number of them may be wanted later.
        replica=integer(target["replica"], f"{path}.replica", shape.lanes, "the job's lanes"),
        stage=integer(target["stage"], f"{path}.stage", shape.stages, "the job's stages"),
        inner=integer(
            target.get("inner", 0), f"{path}.inner", shape.ranks_per_stage, "the ranks of a stage"
        ),
    )


def _parse_effect(
    entry: Mapping[str, object], path: str, action: FaultAction, target: _Target
) -> _Effect:
    may_last = action in (FaultAction.STOP, FaultAction.DISCONNECT)
    for key in ("forSeconds", "factor", "delayMs", "steps"):
        if key in entry and not (may_last if key == "forSeconds" else action is FaultAction.SLOW):
            wants = "stop and disconnect" if key == "forSeconds" else "slow"
            raise InvalidSpecError(f"{path}.{key}", f"means nothing to {action}, only to {wants}")
    if may_last:
        must_end = action is FaultAction.DISCONNECT or target.process is not None
        if must_end and "forSeconds" not in entry:
            raise InvalidSpecError(f"{path}.forSeconds", f"is missing: {action} must end some time")
        if "forSeconds" not in entry:
            return _Effect()
        return _Effect(
            for_s=number(entry["forSeconds"], f"{path}.forSeconds", 0, "seconds", above=True)
        )
    if action is not FaultAction.SLOW:
        return _Effect()
    if "factor" not in entry and "delayMs" not in entry:
        raise InvalidSpecError(
            f"{path}.delayMs", "is missing: how slow is said by delayMs per action, or by factor"
        )
    return _Effect(
        slow_ms=number(entry.get("delayMs", 0), f"{path}.delayMs", 0, "milliseconds"),
        factor=number(entry.get("factor", 1), f"{path}.factor", 1, "times as long"),
        num_steps=integer(
            entry.get("steps", 1), f"{path}.steps", 1_000_000, "a number of steps", start=1
        ),
    )


def _parse_at(
    data: object, path: str, job: Job, known: Mapping[str, FaultPoint], target: _Target
) -> _At:
    at = fields(data, path, AT)
    relations = {key: _relation(at[key], f"{path}.{key}", known) for key in RELATIONS if key in at}
    during = _parse_during(at, path, job, target)
    phase = _parse_phase(at.get("phase"), f"{path}.phase", job, target)
    if during not in (None, During.MASK) and phase is not None:
        raise InvalidSpecError(f"{path}.phase", f"during {during} there is no other; leave it out")
    beside = relations.get("with")
    for key in ("during", "after", "with"):
        rivals = [other for other in ("during", "after", "with") if other in at and other != key]
        if key in at and rivals:
            raise InvalidSpecError(f"{path}.{key}", f"and {rivals[0]} say both when; use one")
    if "after" in at and target.process is not None:
        raise InvalidSpecError(f"{path}.after", "works for ranks and spares; use with, or step")
    step, soon = _parse_step(at, path, job)
    after = relations.get("after")
    if beside is not None:
        other = known[beside]
        step, soon, after = other.step, other.soon, other.after
        if other.during is not None:
            # A recovery has no step of its own: the fault is due once the other one has fired.
            step, soon = job.shape.steps, False
    return _At(
        step=step,
        phase=phase,
        delay_ms=number(at.get("delayMs", 0), f"{path}.delayMs", 0, "milliseconds"),
        soon=soon,
        during=during,
        of=relations.get("of"),
        after=after,
        beside=beside,
    )


def _parse_step(at: Mapping[str, object], path: str, job: Job) -> tuple[int, bool]:
    """Return the step, and whether a later step will do as well."""
    says_when = [key for key in ("during", "with") if key in at]
    if "step" not in at:
        if not says_when and "after" not in at and job.at_step is None:
            raise InvalidSpecError(f"{path}.step", "is missing")
        return job.at_step or 0, not says_when
    if says_when:
        raise InvalidSpecError(f"{path}.step", f"{says_when[0]} says when; leave the step out")
    step = integer(at["step"], f"{path}.step", job.shape.steps, "the job's steps")
    if job.at_step is not None and step < job.at_step:
        raise InvalidSpecError(
            f"{path}.step",
            f"is {step}, but the job has committed {job.at_step} steps already: name a later "
            "step, or none for the next one",
        )
    return step, "after" in at


def _relation(value: object, path: str, known: Mapping[str, FaultPoint]) -> str:
    if not known:
        raise InvalidSpecError(path, f"is {quote(value)}, but there is no fault before this one")
    return choice(value, path, [*known], "the id of a fault before this one")


def _parse_during(at: Mapping[str, object], path: str, job: Job, target: _Target) -> During | None:
    if ("during" in at) != ("of" in at):
        missing = "of" if "during" in at else "during"
        hint = "the id of the fault that is recovered from" if missing == "of" else "a part of it"
        raise InvalidSpecError(f"{path}.{missing}", f"is missing: {hint}")
    if "during" not in at:
        return None
    during = During(choice(at["during"], f"{path}.during", [d.value for d in During]))
    if target.replica is None:
        hint = "with" if target.process else "step"
        raise InvalidSpecError(
            f"{path}.during", f"{target.what} takes no part in a recovery; say when by {hint}"
        )
    if during is During.REPLAY and not job.has_snapshots:
        raise InvalidSpecError(f"{path}.during", NO_SNAPSHOTS)
    # The other stages of one replica go on by themselves once a lost one was made anew.
    alone = job.shape.replicas < 2
    if during is During.MASK and job.has_snapshots:
        alone = job.shape.num_ranks < 2
    if during in (During.MASK, During.HEAL_SOURCE) and alone:
        raise InvalidSpecError(
            f"{path}.during", f"a job of one replica has nobody left that could {during}"
        )
    return during


def _parse_phase(value: object, path: str, job: Job, target: _Target) -> str | None:
    if value is None:
        return None
    if target.replica is None:
        raise InvalidSpecError(
            path, f"{target.what} runs no program and so has no phases; leave it out"
        )
    phase, stages = choice(value, path, PHASE_NAMES), job.shape.stages
    last = target.stage == stages - 1
    beyond = (phase in SENDS_ON and last) or (phase in SENDS_BACK and target.stage == 0)
    # Swapped, a stage at an end passes its layers' activations on both ways.
    if beyond and job.shape.order is Order.IN_ORDER:
        raise InvalidSpecError(path, f"stage {target.stage} of {stages} never comes to {phase}")
    if phase and PHASES.get(phase, (phase,))[0] in OF_CELLS and job.shape.ranks_per_stage == 1:
        raise InvalidSpecError(path, "a stage has one rank, which waits for no other of its cell")
    if phase and phase.upper().startswith("CHECKPOINT") and not job.shape.checkpoint_every_steps:
        raise InvalidSpecError(path, "the job writes no checkpoints (spec.checkpoint.everySteps)")
    if phase and not job.has_snapshots and PHASES.get(phase, (phase,))[0] in OF_SNAPSHOTS:
        raise InvalidSpecError(path, NO_SNAPSHOTS)
    return phase
