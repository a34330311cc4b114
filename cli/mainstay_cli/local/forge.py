"""Asks a forge, a process that is warm, to fork what pods consist of.

There are two: one forks supervisors, one with torch imported forks launchers. Imports cost each
process up to seconds of CPU; forking from a process that has them costs milliseconds. A forge is
reached over a socket pair, with frames (:mod:`mainstay_fork.forge`); its end of that socket is also
its parent pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack

READ_BYTES = 65536


class Forge:
    """A forge's process and the conversation with it."""

    def __init__(self, children: ChildProcesses, child: Child, sock: socket.socket) -> None:
        self.child = child
        self._children = children
        self._socket = sock
        self._launched: dict[str, asyncio.Future[Child]] = {}
        self._exited: dict[str, asyncio.Future[int]] = {}
        self._reading = asyncio.create_task(self._read(), name="forge")

    async def launch(self, pod: str, **wanted: Any) -> Child:
        """Have a process forked for a pod and return it.

        Args:
            pod: UID of the pod.
            wanted: what this kind of forge needs to know besides.

        Raises:
            RemoteProtocolError: the forge refused or ended.
            OSError: the process cannot be watched.
        """
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._launched[pod] = future
        self._exited[pod] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError):  # then its end is noticed by reading
            frame = pack({"kind": "launch", "pod": pod, **wanted})
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        return await future

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        parser = FrameParser()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._socket, READ_BYTES):
                for frame in parser.feed(data):
                    self._take(frame)
        for future in self._launched.values():
            if not future.done():
                future.set_exception(RemoteProtocolError("the forge ended"))
        for code in self._exited.values():
            if not code.done():
                code.set_result(-signal.SIGKILL)

    def _take(self, frame: Frame) -> None:
        pod = str(frame.head.get("pod", ""))
        if frame.kind == "exited":
            if not self._exited[pod].done():
                self._exited[pod].set_result(int(frame.head["code"]))
            return
        future = self._launched.pop(pod, None)
        if future is None or future.done():
            return
        if frame.kind == "launched":
            pid = int(frame.head["pid"])
            try:
                future.set_result(self._children.adopt(pid, self._exited[pod]))
            except OSError as error:  # no descriptor left to watch it with
                future.set_exception(error)
        else:
            reason = frame.head.get("reason")
            future.set_exception(RemoteProtocolError(f"nothing forked for {pod}: {reason}"))


def start_forge(
    children: ChildProcesses,
    module: str,
    log: Path,
    env: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Forge:
    """Start a forge; it accepts requests at once and serves them when it has imported all.

    Args:
        children: owns the process.
        module: the forge's.
        log: of the forge itself; a pod's processes write to its directory.
        env: of the forge and all that it forks.
        arguments: of its command line.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        command = [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments]
        child = children.spawn(command, log=log, environment=env, pass_fds=(theirs.fileno(),))
    return Forge(children, child, ours)
