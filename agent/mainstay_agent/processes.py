"""Launcher and trainers as the supervisor reaches them: what is sent, signalled, killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from dataclasses import replace
from typing import Any

from mainstay_agent.injection import kill_group
from mainstay_agent.local_socket import Peer
from mainstay_agent.network_cut import NetworkCut
from mainstay_agent.settings import SupervisorSettings
from mainstay_core.base import codec
from mainstay_core.base.frames import pack
from mainstay_core.base.ids import Incarnation
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job.config import JobConfig

logger = logging.getLogger(__name__)


class Processes:
    """The processes of one pod that have connected (:class:`injection.Victims`).

    Invariant: ``trainers`` holds at most one connection per slot, of the
    incarnation that the state machine names.

    Args:
        settings: who the pod is.
        network: of this process; it is cut together with that of the others.
    """

    def __init__(self, settings: SupervisorSettings, network: NetworkCut) -> None:
        self._settings = settings
        self._network = network
        self._faults: dict[str, FaultPoint] = {}
        """Injected faults of the job, also those that it was given while it ran."""
        self._sticky: dict[int, set[str]] = {}
        """Faults that have made a slot's device wrong for good, by slot."""
        self.launcher: Peer | None = None
        self.trainers: dict[int, Peer] = {}
        self.fired: set[str] = set()

    @property
    def faults(self) -> tuple[FaultPoint, ...]:
        """All injected faults of the job that are known here."""
        return tuple(self._faults.values())

    def drop_trainer(self, peer: Peer) -> None:
        """A trainer's connection has ended."""
        if self.trainers.get(peer.slot) is peer:
            del self.trainers[peer.slot]

    def send_trainers(self, slots: tuple[int, ...], head: dict[str, Any]) -> None:
        """Send one frame to the trainers of ``slots`` that are connected."""
        self.send_packed(slots, pack(head))

    def send_packed(self, slots: tuple[int, ...], frame: bytes) -> None:
        """Send a frame that is bytes already; likewise."""
        for slot in slots:
            if slot in self.trainers:
                self.trainers[slot].send_packed(frame)

    def send_launcher(self, head: dict[str, Any]) -> None:
        """Send a frame to the launcher, if there is one."""
        if self.launcher is not None:
            self.launcher.send(head)

    def fork(self, slot: int, incarnation: Incarnation, config: JobConfig) -> None:
        """Have the launcher fork a trainer."""
        settings = {
            "config": codec.encode(replace(config, faults=self.faults)),
            "pod": self._settings.pod,
            "slot": slot,
            "incarnation": incarnation,
            "address": self._settings.address,
            "socket": str(self._settings.socket),
            "work_dir": str(self._settings.pod_dir),
        }
        head = {"kind": "fork", "slot": slot, "incarnation": incarnation}
        self.send_launcher({**head, "settings": settings})

    def signal_trainer(self, slot: int, number: int) -> None:
        """Send a signal to the trainer of a slot, directly if its process is visible here."""
        peer = self.trainers.get(slot)
        if peer is not None and peer.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer.pid, number)
        else:
            self.send_launcher({"kind": "signal", "slot": slot, "signal": number})

    def resume(self, slot: int, fault: str) -> None:
        """Tell a halted trainer to go on."""
        self.send_trainers((slot,), {"kind": "resume", "fault": fault})

    def add_faults(self, faults: tuple[FaultPoint, ...]) -> None:
        """Let the trainers know of faults, those of now and those to come."""
        self._faults.update({fault.id: fault for fault in faults})
        for slot in self.trainers:
            self.tell_faults(slot)

    def add_fired(self, fault: str) -> None:
        """Let the trainers know that a fault fires; who comes later is told by its first plan."""
        self.send_trainers(tuple(self.trainers), {"kind": "fault-fired", "fault": fault})

    def tell_faults(self, slot: int) -> None:
        """Tell a trainer all faults: it may have been forked before the newest were known."""
        if self._faults:
            faults = codec.encode(tuple(self._faults.values()))
            sticky = sorted(self._sticky.get(slot, ()))
            self.send_trainers((slot,), {"kind": "faults", "faults": faults, "sticky": sticky})

    def keep_flip(self, slot: int, fault: str) -> None:
        """Have a flip that stays in a slot's device outlive its trainer."""
        known = self._faults.get(fault)
        if known is not None and known.flip is not None and known.flip.sticky:
            self._sticky.setdefault(slot, set()).add(fault)

    async def disconnect(self, for_s: float) -> None:
        """Cut the network of every process of the pod; returns when it is back."""
        self.send_trainers(tuple(self.trainers), {"kind": "disconnect", "for_s": for_s})
        await self._network.run(for_s)

    def kill_pod(self) -> None:
        """Kill the launcher's process group, then our own: nothing of the pod is left."""
        if self.launcher is not None and self.launcher.pid:
            kill_group(self.launcher.pid)
        if os.getpid() == 1:
            # Nothing kills the first process of a container from inside; its launcher, in the
            # other container, ends when our socket does.
            os._exit(128 + signal.SIGKILL)
        kill_group(os.getpid())

    def watch_parent(self) -> None:
        """The parent's pipe can be read: its end is the end of the pod."""
        assert self._settings.parent_fd is not None
        if not os.read(self._settings.parent_fd, 1):
            logger.error("the parent is gone; the pod ends")
            self.kill_pod()
