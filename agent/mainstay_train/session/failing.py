"""Tells that a job cannot run, for a trainer that has no session yet."""

from __future__ import annotations

import os

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.rank.reports import Status
from mainstay_core.wire.facts import Failed
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.session.uplink import Uplink


def report_failure(settings: TrainerSettings, why: str) -> None:
    """Introduce the trainer and tell why the job fails."""
    uplink = Uplink(settings.socket, Status(), settings.config.heartbeat_s, _ignore, _ignore)
    hello = {
        "slot": settings.slot,
        "incarnation": settings.incarnation,
        "pid": os.getpid(),
        "fingerprint": {},
    }
    uplink.send({"kind": "hello", **hello})
    uplink.send_fact(
        Failed(
            pod=PodUid(settings.pod),
            slot=settings.slot,
            incarnation=Incarnation(settings.incarnation),
            evidence=why,
        )
    )


def _ignore(*_: object) -> None:
    return None
