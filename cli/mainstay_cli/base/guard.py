"""Runs one command and ends it when our parent is gone, however the parent died.

``python -m mainstay_cli.base.guard COMMAND...`` with a pipe as standard input, whose
other end only the parent holds: the end of that pipe is the parent's end (a
parent-death signal would also fire when merely a thread of it ends). For servers
that know no such pipe, like Redis. Standard library only, so it starts at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys


def main(command: list[str]) -> int:
    """Run the command in this process's group; return its exit code."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    child_end = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(child_end, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if child_end in ready:
            code = child.wait()
            return code if code >= 0 else 128 - code  # a signal, as shells say it
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
