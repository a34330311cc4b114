"""Ends a job: past its deadline, past its time to live, or deleted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from mainstay_core.job.spec import PLURAL
from mainstay_core.wire.api import ApiError
from mainstay_operator.actuator import Actuator
from mainstay_operator.api_client import ApiClient
from mainstay_operator.events import Note
from mainstay_operator.resources import FINALIZER, JobView, parse_time
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)


def find_deadline(view: JobView, status: Mapping[str, Any], now_s: float) -> str:
    """Return why the job's time is over; empty if it is not."""
    limit = view.spec.get("activeDeadlineSeconds")
    started = status.get("startTime")
    if not limit or not started or status.get("completionTime"):
        return ""
    if now_s < parse_time(started) + float(limit):
        return ""
    return f"it was not complete {limit} s after its start (activeDeadlineSeconds)"


async def expire(view: JobView, status: Mapping[str, Any], actuator: Actuator) -> bool:
    """Delete a job that has been over for long enough."""
    ttl, ended = view.spec.get("ttlSecondsAfterFinished"), status.get("completionTime")
    if ttl is None or not ended or time.time() < parse_time(ended) + float(ttl):
        return False
    await actuator.tell(view, [Note(reason="Expired", message=f"it ended more than {ttl} s ago")])
    await actuator.kube.delete(PLURAL, view.namespace, view.name, view.uid)
    return False


async def finalize(view: JobView, api: ApiClient, actuator: Actuator, settings: Settings) -> bool:
    """Have the api end and forget a deleted job, and let the deletion go on.

    The record is keyed by the job's uid, so one that stays harms nobody: it is
    tried for as long as the finalizer may stay, and never waited for when the
    api is not reached.
    """
    if FINALIZER not in view.finalizers:
        return True
    problem: ApiError | None = None
    try:
        await api.delete_job(view.uid)
    except ApiError as error:
        problem = error
    assert view.deleted_at_s is not None
    busy = time.time() < view.deleted_at_s + settings.finalizer_s
    if problem and busy and not problem.is_away:
        return False
    if problem:
        note = Note(
            reason="RecordKept",
            message=f"what the api keeps of the job (uid {view.uid}) stays: {problem}",
            key="finalizer",
            warning=True,
        )
        await actuator.tell(view, [note])
    await actuator.remove_finalizer(view)
    return True
