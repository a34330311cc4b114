"""Refuses a budget for checks that wait if it is above what the device has."""

from __future__ import annotations

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import show_bytes
from mainstay_core.dmr.settings import Mode, PlanName

FIELD = "spec.detection.dmr.memory"


def check_budget(
    wanted_bytes: int, has_bytes: int | None, device: str, mode: Mode, plan: PlanName
) -> None:
    """Check that a device could hold all that checks which wait may retain.

    Args:
        wanted_bytes: the job's ``detection.dmr.memory``.
        has_bytes: memory of the device; None: that is not known.
        device: for people.
        mode: of the job.
        plan: of the job: by the naive one nothing waits.

    Raises:
        InvalidSpecError: it could not.
    """
    waits = mode is Mode.FULL and plan is not PlanName.NAIVE
    if not waits or has_bytes is None or wanted_bytes <= has_bytes:
        return
    raise InvalidSpecError(
        FIELD,
        f"is {show_bytes(wanted_bytes)}, but {device} has {show_bytes(has_bytes)} in all; must be "
        "at most what it has beside the training",
    )
