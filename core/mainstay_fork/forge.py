"""A forge: one warm process from which children are forked, as somebody asks over a socket.

Many pods on one machine would import the same modules once each. A forge imports them once and
forks a child per pod, each the leader of a process group, so that killing the group kills what
would be a container.

It speaks frames on an inherited Unix socket:

* in: ``launch {pod, ...}``, with what the kind of forge needs to know; ``kill {pod}``
* out: ``ready {pid}`` after the imports, ``launched {pod, pid}``, ``exited {pod, pid, code}``
  (negative: the signal that ended it), ``refused {pod, reason}``

It ends when the socket ends, and everything that it forked ends with it.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_fork import children

READ_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A child that somebody asks for: its work, and where its output goes."""

    run: Callable[[], int]
    """What it does; the result is its exit code."""
    log: Path
    """Takes its output."""


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    pid: int
    pidfd: int


class Forge:
    """Forks, kills and reaps children.

    Invariant: ``_pods`` holds the children that were forked and not yet reaped, by pidfd.

    Args:
        line: the socket of whoever asks.
        read: returns what a ``launch`` frame wants; raises KeyError where it lacks something.
        new_sessions: whether each child leads a session of its own, not only a process group.
    """

    def __init__(
        self, line: socket.socket, read: Callable[[Frame], Wanted], *, new_sessions: bool = False
    ) -> None:
        self._line = line
        self._read = read
        self._new_sessions = new_sessions
        self._parser = FrameParser()
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ)
        self._pods: dict[int, _Pod] = {}

    def run(self) -> int:
        """Serve until the line ends; return the exit code."""
        try:
            self._send({"kind": "ready", "pid": os.getpid()})
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is not self._line:
                        self._report_end(self._pods[key.fd])
                    elif not self._receive():
                        return 0
        except ConnectionError:
            return 0
        finally:
            for pod in tuple(self._pods.values()):
                self._kill(pod)
                children.reap(pod.pid)

    def _receive(self) -> bool:
        data = self._line.recv(READ_BYTES)
        for frame in self._parser.feed(data):
            self._handle(frame)
        return bool(data)

    def _handle(self, frame: Frame) -> None:
        pod = str(frame.head.get("pod", ""))
        if frame.kind == "launch":
            self._launch(pod, frame)
        elif frame.kind == "kill":
            for running in self._pods.values():
                if running.name == pod:
                    self._kill(running)
        else:
            self._send({"kind": "refused", "pod": pod, "reason": f"unknown kind {frame.kind!r}"})

    def _launch(self, pod: str, frame: Frame) -> None:
        try:
            wanted = self._read(frame)
            pid = children.fork(
                lambda: self._become(wanted),
                wanted.log,
                [self._line, self._selector],
                new_group=True,
                new_session=self._new_sessions,
            )
        except (KeyError, MainstayError, OSError) as error:
            self._send({"kind": "refused", "pod": pod, "reason": str(error)})
            return
        running = _Pod(pod, pid, os.pidfd_open(pid))
        self._pods[running.pidfd] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ)
        self._send({"kind": "launched", "pod": pod, "pid": pid})

    def _become(self, wanted: Wanted) -> int:
        for pidfd in self._pods:
            os.close(pidfd)
        return wanted.run()

    @staticmethod
    def _kill(pod: _Pod) -> None:
        # Its group is made by the child itself: right after the fork there may be none yet.
        with suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pod.pid, signal.SIGKILL)

    def _report_end(self, pod: _Pod) -> None:
        del self._pods[pod.pidfd]
        self._selector.unregister(pod.pidfd)
        os.close(pod.pidfd)
        # Before it is reaped: until then the number of its group is nobody else's.
        with suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
        code, number = children.reap(pod.pid)
        code = code if number is None else -number
        self._send({"kind": "exited", "pod": pod.name, "pid": pod.pid, "code": code})

    def _send(self, head: dict[str, object]) -> None:
        self._line.sendall(pack(head))
