"""The uplink: a trainer's connection to its supervisor.

Plans come down; facts, ledger entries and status go up. A thread reads the Unix
socket, so that a plan is seen while the main thread computes or waits in a
collective. The end of the connection is the end of the trainer: a process whose
supervisor is gone must not go on in anybody's name.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mainstay_core.base import codec
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.dmr.findings import Finding
from mainstay_core.faults.points import FaultPoint
from mainstay_core.rank.reports import Status
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Fact
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan
from mainstay_train.base import network_cut

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
EXIT_LOST = 3
"""Exit code when the supervisor's socket ends."""


class Uplink:
    """Connection to the supervisor. Sending is thread-safe.

    Args:
        path: the supervisor's Unix socket.
        status: sent every ``interval_s``.
        interval_s: seconds between two status frames.
        on_plan: called in the reader thread with every plan.
        on_stop: called in the reader thread when the job has ended.
        on_faults: called in the reader thread with faults that a running job is given, and with the
            ids of those that have made this slot's device wrong for good.
        on_fired: called in the reader thread with the id of a fault that fires, anywhere.
    """

    def __init__(
        self,
        path: str,
        status: Status,
        interval_s: float,
        on_plan: Callable[[Plan], None],
        on_stop: Callable[[], None],
        on_faults: Callable[[Sequence[FaultPoint], Collection[str]], None] = lambda *_: None,
        on_fired: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._sending = threading.Lock()
        self._status, self._interval_s = status, interval_s
        self._on_plan, self._on_stop = on_plan, on_stop
        self._on_faults, self._on_fired = on_faults, on_fired
        self._resumed: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="uplink", daemon=True)

    def start(self, hello: dict[str, Any]) -> None:
        """Say hello and begin to read."""
        self.send({"kind": "hello", **hello})
        self._thread.start()

    def send(self, head: dict[str, Any]) -> None:
        """Send a frame; a lost supervisor ends this process."""
        try:
            with self._sending:
                self._socket.sendall(pack(head))
        except OSError:
            self._lost()

    def send_status(self) -> None:
        """Send what the trainer does now."""
        status = self._status
        self.send(
            {
                "kind": "status",
                "phase": status.phase,
                "waiting": status.waiting,
                "step": status.step,
                "progress": status.progress,
                "quorum": codec.encode(status.quorum),
            }
        )

    def send_fact(self, fact: Fact) -> None:
        """Send a fact."""
        self.send({"kind": "fact", "fact": codec.encode(fact)})

    def send_crash(self, slot: int, incarnation: str, crash: Crash) -> None:
        """Send the exception that ends this program."""
        head = {"slot": slot, "incarnation": incarnation, "crash": codec.encode(crash)}
        self.send({"kind": "crash", **head})

    def send_finding(self, finding: Finding) -> None:
        """Send what a check has found."""
        self.send({"kind": "finding", "finding": codec.encode(finding)})

    def pass_plan(self, plan: dict[str, Any]) -> None:
        """Give a plan that another supervisor holds to ours, which passes it back if it is new."""
        self.send({"kind": "plan", "plan": plan})

    def record(self, entry: LedgerEntry, *, post: bool) -> None:
        """Give a ledger entry to the supervisor; with ``post`` it mirrors it to the api."""
        self.send({"kind": "ledger", "entry": codec.encode(entry), "post": post})

    def reach_fault(self, head: dict[str, Any], *, halt: bool) -> None:
        """Report a fault point; with ``halt`` wait there until killed or told to go on."""
        self.send({"kind": "fault-point", **head})
        if not halt:
            return
        with self._changed:
            self._changed.wait_for(lambda: head["fault"] in self._resumed)

    def _read(self) -> None:
        parser = FrameParser()
        due = time.monotonic()
        while True:
            left = due - time.monotonic()
            if left <= 0:
                self.send_status()
                due = time.monotonic() + self._interval_s
                continue
            ready, _, _ = select.select([self._socket], [], [], left)
            if not ready:
                continue
            data = self._receive()
            for frame in parser.feed(data):
                self._handle(frame)

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._lost()
        return data

    def _handle(self, frame: Frame) -> None:
        if frame.kind == "plan":
            self._on_plan(codec.decode(Plan, frame.head["plan"]))
        elif frame.kind == "stop":
            self._on_stop()
        elif frame.kind == "resume":
            with self._changed:
                self._resumed.add(str(frame.head["fault"]))
                self._changed.notify_all()
        elif frame.kind == "faults":
            faults = codec.decode(tuple[FaultPoint, ...], frame.head["faults"])
            self._on_faults(faults, [str(fault) for fault in frame.head.get("sticky", ())])
        elif frame.kind == "fault-fired":
            self._on_fired(str(frame.head["fault"]))
        elif frame.kind == "disconnect":
            network_cut.begin(float(frame.head["for_s"]))
        else:
            logger.warning("the supervisor sent an unknown frame: %s", frame.kind)

    @staticmethod
    def _lost() -> None:
        logger.error("the supervisor is gone; this trainer ends")
        os._exit(EXIT_LOST)
