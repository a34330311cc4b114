"""Trainers without training, for tests of launcher and supervisor: `--trainer fake_trainers:run`.

Each says hello on the supervisor's socket like a real one; ``config.args`` says what follows.
"""

from __future__ import annotations

import os
import resource
import socket
import sys

from mainstay_core.base import codec
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_train.base.settings import TrainerSettings


class Line:
    """A trainer's end of the supervisor's socket."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(settings.socket)
        self._parser = FrameParser()
        self._frames: list[Frame] = []
        self.send(
            kind="hello",
            slot=settings.slot,
            incarnation=settings.incarnation,
            pid=os.getpid(),
            fingerprint={"threads": str(len(os.listdir("/proc/self/task")))},
        )

    def send(self, **head: object) -> None:
        self.socket.sendall(pack(head))

    def receive(self) -> Frame | None:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._frames += self._parser.feed(data)
        return self._frames.pop(0)


def run(settings: TrainerSettings) -> int:
    """Do what ``config.args[0]`` names: wait, exit:CODE, raise, die:SIGNAL, threads, fds."""
    what, _, value = settings.config.args[0].partition(":")
    line = Line(settings)
    if what == "exit":
        return int(value)
    if what == "raise":
        raise RuntimeError("a bug in the workload")
    if what == "die":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # nobody looks at a core
        os.kill(os.getpid(), int(value))
    if what == "fds":
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in sorted(os.listdir("/proc/self/fd"))
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        line.send(kind="log", level="info", text="\n".join(links))
    if what == "torch":
        torch = sys.modules["torch"]
        line.send(
            kind="log", level="info", text=f"{torch.get_num_threads()} {settings.config.name}"
        )
    if what == "print":
        sys.stdout.write(f"said {value}\n")
        sys.stdout.flush()
        os.system("echo by a child >&2; printf 'without an end'")
        return 0
    if what == "status":
        line.send(kind="status", phase="computing", waiting=False, step=1, progress=1, quorum=None)
    if what == "chat":
        return chat(line, settings)
    while True:  # until stopped or the supervisor is gone
        frame = line.receive()
        if frame is None:
            return 3
        if frame.kind == "stop":
            return 0


def chat(line: Line, settings: TrainerSettings) -> int:
    """Echo every frame that arrives as a log record, so that a test sees what a trainer sees."""
    while (frame := line.receive()) is not None:
        line.send(kind="log", level="info", text=codec.dumps(frame.head))
        if frame.kind == "stop":
            return 0
    return 3
