"""Reads the wrong bit of a faults file: ``flip`` of the action ``flip``."""

from __future__ import annotations

from mainstay_core.base.bounds import MAX_BLOCKS
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.flips import MAX_BITS, Execution, Flip
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
)
FLIP_PHASES: dict[str, tuple[Pass, ...]] = {
    "forward": (Pass.FORWARD,),
    "backward": (Pass.BACKWARD, Pass.WEIGHT, Pass.FORWARD, Pass.STEP),
    "reduce": (Pass.STEP,),
    "vote": (Pass.STEP,),
    "apply": (Pass.STEP,),
}
"""Phases in which operators are called, and the passes of each. The first one is meant if none is
named. The backward phase has the recompute's forward and the sums of types, too."""
MAX_ELEMENT = 2**53
OF_A_TYPE = ("type", "microBatch", "block")
"""Fields that mean nothing to what is done once a step, the sums of types left out."""


def parse_flip(data: object, path: str, phase: str | None, shape: JobShape) -> Flip:
    """Return the wrong bit that an entry describes.

    Args:
        data: value of the entry's field ``flip``.
        path: of that field.
        phase: of the entry, one of :data:`FLIP_PHASES`.
        shape: of the job.

    Raises:
        InvalidSpecError: names the field, and says what would be right.
    """
    if data is None:
        raise InvalidSpecError(path, f"is missing: which bit is wrong ({', '.join(FLIP)})")
    flip = fields(data, path, FLIP)
    for key in ("element", "bit"):
        if key not in flip:
            raise InvalidSpecError(f"{path}.{key}", "is missing")
    passes = FLIP_PHASES[phase or ""]
    names = [p.value for p in passes]
    in_pass = Pass(choice(flip.get("pass", names[0]), f"{path}.pass", names, f"phase {phase}"))
    for key in OF_A_TYPE:
        if key in flip and passes == (Pass.STEP,):
            raise InvalidSpecError(
                f"{path}.{key}", f"means nothing in phase {phase}, which is once a step"
            )

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
    execution = flip.get("execution", Execution.PRIMARY.value)
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
    )
