"""Reads the plan of checks that a job names for a stage."""

from __future__ import annotations

from pathlib import Path

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.plan import Plan
from mainstay_core.dmr.profiles import WHOLE_WAY
from mainstay_core.dmr.schedule import FIELD, read_ordered_plan
from mainstay_core.dmr.settings import STAGE, WAY

MAX_PLAN_BYTES = 1 << 26
"""Bound on a plan's file: a thousand times a plan of a block of 100 operators."""


def read_plan_file(path: str, stage: int, fingerprint: str, way: str = WHOLE_WAY) -> Plan:
    """Return the plan that a job names for a stage.

    Args:
        path: of the file; ``{stage}`` in it stands for the stage's number, ``{way}`` for the way.
        stage: the stage.
        fingerprint: of the job.
        way: of micro-batches through the stage.

    Raises:
        InvalidSpecError: it is missing, torn, too large, no plan, of another fingerprint, or for
            another way.
    """
    place = path.replace(STAGE, str(stage)).replace(WAY, way)
    try:
        if Path(place).exists() and not Path(place).is_file():
            raise InvalidSpecError(FIELD, f"{place} is no file")  # a pipe would hold us up
        with Path(place).open("rb") as file:
            text = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        raise InvalidSpecError(
            FIELD, f"{place} cannot be read: {error.strerror or error}"
        ) from None  # who reads it needs no more than that
    if len(text) > MAX_PLAN_BYTES:
        raise InvalidSpecError(FIELD, f"{place} has more than {MAX_PLAN_BYTES} bytes; is no plan")
    return read_ordered_plan(text, place, fingerprint, way)
