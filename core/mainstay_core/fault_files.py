"""FAULTS.yaml: what to break, where and when, read from loaded YAML.

A list of ``{at: {step, phase?, delayMs?}, target: {replica, stage, inner?} |
{spare}, action}``. A target names the rank in the quorum in force when the fault
fires (design 13.8); ``phase`` names an action of the step's program or an alias
of it, and ``delayMs`` counts from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from mainstay_core.errors import InvalidSpecError
from mainstay_core.faults import PHASES, SENDS_BACK, SENDS_ON, FaultAction, FaultPoint
from mainstay_core.topology import JobShape

ACTIONS = tuple(action.value for action in FaultAction)
PHASE_NAMES = (*PHASES, *(op for ops in PHASES.values() for op in ops), *SENDS_ON, *SENDS_BACK)
"""Aliases first, then the program actions they stand for."""


def parse_faults(
    data: object, shape: JobShape, num_spares: int, name: str = "faults"
) -> tuple[FaultPoint, ...]:
    """Return the faults of a file, in its order, checked against the job.

    Args:
        data: loaded YAML: a list of entries, or nothing.
        shape: of the job the faults are for; a target outside it would never fire.
        num_spares: standby pods of the job.
        name: how to call the list in messages.

    Raises:
        InvalidSpecError: names entry and field, and says what would be right.
    """
    if data is None:
        return ()
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Sequence):
        raise InvalidSpecError(name, f"expected a list of faults, found {type(data).__name__}")
    faults = tuple(
        _parse_fault(entry, index, f"{name}[{index}]", shape, num_spares)
        for index, entry in enumerate(data)
    )
    seen: dict[str, int] = {}
    for index, fault in enumerate(faults):
        if fault.id in seen:
            raise InvalidSpecError(
                f"{name}[{index}].id", f"is {fault.id!r}, which entry {seen[fault.id]} has already"
            )
        seen[fault.id] = index
    return faults


def _parse_fault(
    data: object, index: int, path: str, shape: JobShape, num_spares: int
) -> FaultPoint:
    entry = _mapping(data, path, ("at", "target", "action", "id"))
    for key in ("at", "target", "action"):
        if key not in entry:
            raise InvalidSpecError(f"{path}.{key}", "is missing")
    at = _mapping(entry["at"], f"{path}.at", ("step", "phase", "delayMs"))
    if "step" not in at:
        raise InvalidSpecError(f"{path}.at.step", "is missing")
    target = _mapping(entry["target"], f"{path}.target", ("replica", "stage", "inner", "spare"))
    replica, stage, inner, spare = _parse_target(target, f"{path}.target", shape, num_spares)
    phase = _parse_phase(at.get("phase"), f"{path}.at.phase")
    if spare is not None and phase is not None:
        raise InvalidSpecError(
            f"{path}.at.phase", "a spare runs no program and so has no phases; leave it out"
        )
    if (phase in SENDS_ON and stage == shape.stages - 1) or (phase in SENDS_BACK and stage == 0):
        raise InvalidSpecError(
            f"{path}.at.phase", f"stage {stage} of {shape.stages} never comes to {phase}"
        )
    delay_ms = at.get("delayMs", 0)
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int | float) or delay_ms < 0:
        raise InvalidSpecError(
            f"{path}.at.delayMs", f"is {delay_ms!r}, must be milliseconds, 0 or more"
        )
    return FaultPoint(
        id=_parse_id(entry.get("id", f"fault-{index}"), f"{path}.id"),
        step=_integer(at["step"], f"{path}.at.step", shape.steps, "the job's steps"),
        action=_parse_action(entry["action"], f"{path}.action"),
        phase=phase,
        delay_ms=float(delay_ms),
        replica=replica,
        stage=stage,
        inner=inner,
        spare=spare,
    )


def _parse_target(
    target: Mapping[str, object], path: str, shape: JobShape, num_spares: int
) -> tuple[int | None, int | None, int, int | None]:
    """Return (replica, stage, inner, spare)."""
    if "spare" in target:
        if len(target) > 1:
            raise InvalidSpecError(path, "names a spare and a rank; use either one")
        if num_spares < 1:
            raise InvalidSpecError(f"{path}.spare", "the job has no spares (spec.spares.replicas)")
        return None, None, 0, _integer(target["spare"], f"{path}.spare", num_spares, "the spares")
    for key in ("replica", "stage"):
        if key not in target:
            raise InvalidSpecError(
                f"{path}.{key}", "is missing; a target is {replica, stage} or {spare}"
            )
    return (
        _integer(target["replica"], f"{path}.replica", shape.replicas, "the job's replicas"),
        _integer(target["stage"], f"{path}.stage", shape.stages, "the job's stages"),
        _integer(
            target.get("inner", 0), f"{path}.inner", shape.ranks_per_stage, "the ranks of a stage"
        ),
        None,
    )


def _parse_id(value: object, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidSpecError(path, f"is {value!r}, must be a text that names the fault")
    return value


def _parse_phase(value: object, path: str) -> str | None:
    if value is None or value in PHASE_NAMES:
        return None if value is None else str(value)
    raise InvalidSpecError(path, f"is {value!r}, {_one_of(str(value), PHASE_NAMES)}")


def _parse_action(value: object, path: str) -> FaultAction:
    if value in ACTIONS:
        return FaultAction(str(value))
    raise InvalidSpecError(path, f"is {value!r}, {_one_of(str(value), ACTIONS)}")


def _one_of(value: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"must be one of {', '.join(valid)}{hint}"


def _integer(value: object, path: str, end: int, of_what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise InvalidSpecError(
            path, f"is {value!r}, must be a whole number from 0 to {end - 1}, as {of_what}"
        )
    return value


def _mapping(data: object, path: str, valid: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(data, Mapping):
        raise InvalidSpecError(
            path, f"expected fields ({', '.join(valid)}), found {type(data).__name__}"
        )
    for key in data:
        if key not in valid:
            close = difflib.get_close_matches(str(key), valid, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InvalidSpecError(
                f"{path}.{key}", f"unknown field; {hint}valid here: {', '.join(valid)}"
            )
    return data
