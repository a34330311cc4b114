"""Logs what the operator decides, one line each, with the job that it is about."""

from __future__ import annotations

import logging

from mainstay_core.base.logs import about
from mainstay_operator.resources import JobView

logger = logging.getLogger(__name__)


def about_job(view: JobView) -> dict[str, str]:
    """Return the fields by which a line names its job."""
    return {"job": f"{view.namespace}/{view.name}", "uid": view.uid}


def log_decision(view: JobView, decision: str, message: str, *, warning: bool = False) -> None:
    """Log a decision about a job.

    Args:
        view: the job.
        decision: what was decided, in one word: an Event's, or one of docs/operator.md's.
        message: what, to which objects, and why.
        warning: whether something is not as it should be.
    """
    level = logging.WARNING if warning else logging.INFO
    logger.log(level, "%s", message, extra=about(**about_job(view), decision=decision))
