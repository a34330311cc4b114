"""Answers to requests that fail: a status and a name for each refusal and each store failure.

Programs tell answers apart by the name; a supervisor goes by it
(:class:`mainstay_core.wire.api.ApiRefused`).
"""

from __future__ import annotations

from mainstay_core.base.errors import (
    InvalidSpecError,
    MainstayError,
    RemoteProtocolError,
    StoreConflictError,
)
from mainstay_core.control_plane.answers import StaleFactsError
from mainstay_core.control_plane.job_store import StoreUnavailableError, UnknownJobError
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.intake.store_recovery import StoreBehindError
from mainstay_core.wire.api import UNKNOWN_FORMAT
from mainstay_core.wire.formats import UnknownFormatError

PROBLEMS: dict[type[MainstayError], tuple[int, str]] = {
    UnregisteredPodError: (409, "unregistered"),
    StaleFactsError: (409, "stale"),
    StoreBehindError: (409, "store-behind"),
    UnknownJobError: (404, "unknown-job"),
    RemoteProtocolError: (409, "conflict"),
    UnknownFormatError: (422, UNKNOWN_FORMAT),
    InvalidSpecError: (422, "invalid-spec"),
    StoreConflictError: (503, "busy"),
    StoreUnavailableError: (503, "store-unavailable"),
}
"""By type of error: HTTP status, and the problem's name."""


def problem_of(error: Exception) -> tuple[int, str] | None:
    """Return status and name of an error's answer; None if it is no answer to anybody."""
    kinds = (PROBLEMS[kind] for kind in type(error).__mro__ if kind in PROBLEMS)
    return next(kinds, None)
