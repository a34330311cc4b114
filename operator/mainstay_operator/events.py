"""Events about a job: typed, and named after what they tell, so that none is told twice."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from mainstay_core.base import bounds
from mainstay_core.job.spec import API_VERSION, GROUP, KIND
from mainstay_operator.resources import FIELD_MANAGER, JobView, show_time

MAX_MESSAGE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The content of one Event: what happened to a job, or what the operator did about it."""

    reason: str
    message: str
    key: str = ""
    """What makes it this one and no other; the message if it is left out."""
    warning: bool = False


def build_event(view: JobView, note: Note, now_s: float, instance: str) -> dict[str, Any]:
    """Return the Event object of a note.

    Its name follows from the job's uid and the note's reason and key: an
    operator that starts anew and finds the same again makes the same object.
    """
    key = f"{view.uid}/{note.reason}/{note.key or note.message}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    at = show_time(now_s)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{view.name}.{digest}",
            "namespace": view.namespace,
            "labels": {f"{GROUP}/job-name": view.name},
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": view.name,
            "namespace": view.namespace,
            "uid": view.uid,
        },
        "reason": note.reason,
        "message": bounds.cut(note.message, MAX_MESSAGE),
        "type": "Warning" if note.warning else "Normal",
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": f"{GROUP}/operator",
        "reportingInstance": instance,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
