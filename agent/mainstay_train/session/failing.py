"""Tells how a trainer's program ends, for one that has no session yet."""

from __future__ import annotations

import os

from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.rank.reports import Status
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Failed
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.session.uplink import Uplink


class Teller:
    """Tells the supervisor how the program ends, before there is a session.

    Args:
        settings: who the trainer is.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings

    def fail(self, why: str, crash: Crash) -> None:
        """Introduce the trainer and tell why the job fails."""
        settings, uplink = self._settings, self._connect()
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
                evidence=crash.place(why),
                crash=crash,
            )
        )

    def crash(self, crash: Crash) -> None:
        """Tell what ends this trainer. It is not introduced: it must not get a rank."""
        self._connect().send_crash(self._settings.slot, self._settings.incarnation, crash)

    def _connect(self) -> Uplink:
        settings = self._settings
        return Uplink(settings.socket, Status(), settings.config.heartbeat_s, _ignore, _ignore)


def _ignore(*_: object) -> None:
    return None
