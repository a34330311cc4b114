"""Ends a job past its deadline, and deletes one past its time to live."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mainstay_core.job.spec import PLURAL
from mainstay_operator.actuator import Actuator
from mainstay_operator.events import Note
from mainstay_operator.resources import JobView, parse_time


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
