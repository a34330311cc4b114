"""Reads the wrong bit of a faults file: ``flip`` of the action ``flip``."""

from __future__ import annotations

from collections.abc import Mapping

from mainstay_core.base.bounds import MAX_BLOCKS
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import quote
from mainstay_core.dmr.flips import MAX_BITS, Execution, Flip, StatePart, Where
from mainstay_core.dmr.operators import MAX_OPERANDS, MAX_OPERATORS, Pass
from mainstay_core.faults.fields import choice, fields, integer, text

FLIP = (
    "type",
    "microBatch",
    "pass",
    "block",
    "operator",
    "output",
    "element",
    "bit",
    "execution",
    "sticky",
    "where",
    "part",
)
FIELDS: Mapping[Where, tuple[str, ...]] = {
    Where.COMPUTE: tuple(name for name in FLIP if name != "part"),
    Where.WIRE: ("where", "element", "bit"),
    Where.STATE: ("where", "block", "part", "output", "element", "bit"),
    Where.BATCH: ("where", "type", "microBatch", "output", "element", "bit", "execution"),
}
"""Fields that mean something, by what the flip makes wrong."""
FLIP_PHASES: Mapping[str, tuple[Pass, ...]] = {
    "forward": (Pass.FORWARD,),
    "backward": (Pass.BACKWARD, Pass.WEIGHT, Pass.FORWARD, Pass.STEP),
    "reduce": (Pass.STEP,),
    "vote": (Pass.STEP,),
    "apply": (Pass.STEP,),
}
"""Phases in which operators are called, and the passes of each. The first one is meant if none is
named. The backward phase has the recompute's forward and the sums of types, too."""
ONLY_PHASE: Mapping[Where, str | None] = {
    Where.WIRE: "reduce",
    Where.STATE: None,
    Where.BATCH: "forward",
}
"""The phase of what no operator has made; the state is hit before a step's phases."""
MAX_ELEMENT = 2**53
OF_A_TYPE = ("type", "microBatch", "block")
"""Fields that mean nothing to what is done once a step, the sums of types left out."""


def parse_flip(
    data: object, path: str, phase: str | None, shape: JobShape, *, at: str, stage: int | None
) -> Flip:
    """Return the wrong bit that an entry describes.

    Args:
        data: value of the entry's field ``flip``.
        path: of that field.
        phase: of the entry.
        shape: of the job.
        at: path of the entry's field ``at``.
        stage: of the entry's target.

    Raises:
        InvalidSpecError: names the field, and says what would be right.
    """
    if data is None:
        raise InvalidSpecError(path, f"is missing: which bit is wrong ({', '.join(FLIP)})")
    flip = fields(data, path, FLIP)
    where = Where(
        choice(flip.get("where", Where.COMPUTE.value), f"{path}.where", [w.value for w in Where])
    )
    for key in flip:
        if key not in FIELDS[where]:
            valid = ", ".join(FIELDS[where])
            raise InvalidSpecError(
                f"{path}.{key}", f"means nothing with where: {where.value}; valid here: {valid}"
            )
    _check_phase(phase, f"{at}.phase", where)
    for key in ("element", "bit"):
        if key not in flip:
            raise InvalidSpecError(f"{path}.{key}", "is missing")
    if where is Where.BATCH and stage not in (0, shape.stages - 1):
        raise InvalidSpecError(
            f"{path}.where", f"is batch, but stage {stage} of {shape.stages} fetches none"
        )
    sticky = flip.get("sticky", False)
    if not isinstance(sticky, bool):
        raise InvalidSpecError(f"{path}.sticky", f"is {quote(sticky)}, must be true or false")
    if sticky and "execution" in flip:
        raise InvalidSpecError(
            f"{path}.execution", "means nothing with sticky: every execution is wrong; leave it out"
        )
    in_pass = Pass.STEP
    if where is Where.COMPUTE:
        in_pass = _parse_pass(flip, path, phase or "")
    return _parse_rest(flip, path, where, in_pass, shape, sticky=sticky)


def _check_phase(phase: str | None, path: str, where: Where) -> None:
    """Refuse a phase in which nothing of what the flip makes wrong comes."""
    if where is Where.COMPUTE and phase not in FLIP_PHASES:
        found = "is missing" if phase is None else f"is {quote(phase)}"
        raise InvalidSpecError(
            path, f"{found}, must be one of {', '.join(FLIP_PHASES)}, for a flip"
        )
    if where is Where.COMPUTE or phase == ONLY_PHASE[where]:
        return
    if where is Where.STATE:
        raise InvalidSpecError(
            path, "means nothing to the state, which is hit before the step computes; leave it out"
        )
    found = "is missing" if phase is None else f"is {quote(phase)}"
    raise InvalidSpecError(
        path, f"{found}, must be {ONLY_PHASE[where]}, for a flip with where: {where.value}"
    )


def _parse_pass(flip: Mapping[str, object], path: str, phase: str) -> Pass:
    passes = FLIP_PHASES[phase]
    names = [p.value for p in passes]
    for key in OF_A_TYPE:
        if key in flip and passes == (Pass.STEP,):
            raise InvalidSpecError(
                f"{path}.{key}", f"means nothing in phase {phase}, which is once a step"
            )
    return Pass(choice(flip.get("pass", names[0]), f"{path}.pass", names, f"phase {phase}"))


def _parse_rest(
    flip: Mapping[str, object],
    path: str,
    where: Where,
    in_pass: Pass,
    shape: JobShape,
    *,
    sticky: bool,
) -> Flip:
    def place(key: str, end: int, of_what: str) -> int | None:
        return integer(flip[key], f"{path}.{key}", end, of_what) if key in flip else None

    wanted = flip.get("operator")
    operator: int | str | None = None
    if isinstance(wanted, str):
        operator = text(wanted, f"{path}.operator", "that names a kernel, e.g. aten.mm")
    elif wanted is not None:
        operator = integer(
            wanted, f"{path}.operator", MAX_OPERATORS, "ordinal, or a kernel's name as aten.mm"
        )
    part = flip.get("part", StatePart.MASTERS.value)
    default = Execution.BOTH if sticky else Execution.PRIMARY
    execution = flip.get("execution", default.value)
    return Flip(
        in_pass=in_pass,
        shard_type=place("type", shape.num_types, "the job's shard types"),
        micro_batch=place("microBatch", shape.micro_batches, "the micro-batches of a type"),
        block=place("block", MAX_BLOCKS, "blocks of a stage"),
        operator=operator,
        output=integer(flip.get("output", 0), f"{path}.output", MAX_OPERANDS, "its outputs"),
        element=integer(flip["element"], f"{path}.element", MAX_ELEMENT, "an element's place"),
        bit=integer(flip["bit"], f"{path}.bit", MAX_BITS, "a bit of an element, 0 the lowest"),
        execution=Execution(choice(execution, f"{path}.execution", [e.value for e in Execution])),
        sticky=sticky,
        where=where,
        part=(
            StatePart(choice(part, f"{path}.part", [p.value for p in StatePart]))
            if where is Where.STATE
            else None
        ),
    )
