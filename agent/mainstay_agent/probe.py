"""Asks the pod's supervisor how it is: ``python -m mainstay_agent --check ready|live``.

For the exec probes of the supervisor's container. The answer comes from the process
itself, over the pod's Unix socket, and says nothing of the api: a pod must not count
as unready because something far away is.
"""

from __future__ import annotations

import socket
from pathlib import Path

from mainstay_core.base.errors import ProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack

TIMEOUT_S = 5.0
READ_BYTES = 1 << 16


def check(path: Path, what: str) -> str:
    """Return why the pod is not well; empty if it is.

    Args:
        path: of the supervisor's Unix socket.
        what: ``live`` if the supervisor answers, ``ready`` if every slot has a trainer as well.
    """
    try:
        answer = _ask(path)
    except (OSError, ProtocolError) as error:
        return f"the supervisor does not answer at {path}: {error}"
    why_not = str(answer.head.get("why_not", ""))
    return why_not if what == "ready" else ""


def _ask(path: Path) -> Frame:
    parser = FrameParser()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(TIMEOUT_S)
        line.connect(str(path))
        line.sendall(pack({"kind": "check"}))
        while data := line.recv(READ_BYTES):
            for frame in parser.feed(data):
                return frame
    raise ConnectionResetError("it closed the connection")
