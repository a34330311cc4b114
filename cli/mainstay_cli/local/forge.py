"""Asks the forge, the one process with torch preloaded, to fork the pods' launchers.

Importing torch costs seconds of CPU per process; forking from a process that has
it costs milliseconds. The forge is reached over a socket pair, with frames; its
end of that socket is also its parent pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack

READ_BYTES = 65536


class Forge:
    """The forge's process and the conversation with it."""

    def __init__(self, children: ChildProcesses, child: Child, sock: socket.socket) -> None:
        self.child = child
        self._children = children
        self._socket = sock
        self._launched: dict[str, asyncio.Future[Child]] = {}
        self._exited: dict[str, asyncio.Future[int]] = {}
        self._reading = asyncio.create_task(self._read(), name="forge")

    async def launch(self, pod: str, pod_dir: Path) -> Child:
        """Have a launcher forked for a pod and return it.

        Args:
            pod: UID of the pod.
            pod_dir: where it finds its supervisor's socket and writes its logs.

        Raises:
            RemoteProtocolError: the forge refused or ended.
            OSError: the launcher cannot be watched.
        """
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._launched[pod] = future
        self._exited[pod] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(OSError):  # then its end is noticed by reading
            head = {
                "kind": "launch",
                "pod": pod,
                "pod_dir": str(pod_dir),
                "socket": str(pod_dir / "supervisor.sock"),
            }
            await asyncio.get_running_loop().sock_sendall(self._socket, pack(head))
        return await future

    async def exit_code(self, pod: str) -> int:
        """Return with what a launcher exited; negative is the signal that ended it."""
        return await asyncio.shield(self._exited[pod])

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
                future.set_result(self._children.adopt(pid))
            except OSError as error:  # no descriptor left to watch it with
                future.set_exception(error)
        else:
            reason = frame.head.get("reason")
            future.set_exception(RemoteProtocolError(f"no launcher for {pod}: {reason}"))


def start_forge(
    children: ChildProcesses,
    log: Path,
    env: Mapping[str, str],
    preload: Sequence[str] = (),
    num_trainers: int = 1,
) -> Forge:
    """Start the forge; it accepts requests at once and serves them when torch is there.

    Args:
        children: owns the process.
        log: of the forge itself; a pod's processes write to its directory.
        env: of the forge, its launchers and all trainers.
        preload: modules that every trainer needs, imported once.
        num_trainers: that run at a time.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        command = [
            sys.executable,
            "-m",
            "mainstay_train.launcher.forge",
            "--fd",
            str(theirs.fileno()),
        ]
        command += ["--trainers", str(num_trainers)]
        command += [f"--preload={module}" for module in preload]
        child = children.spawn(command, log=log, environment=env, pass_fds=(theirs.fileno(),))
    return Forge(children, child, ours)
