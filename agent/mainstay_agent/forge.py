"""The forge of supervisors, in local mode: one warm process, which forks one for each pod.

A supervisor's imports take most of a second of CPU; a run has one for each pod.

``launch`` says ``pod``, ``log``, the file for its output, and ``environment``, what a supervisor of
its own process would find there besides the forge's own (:mod:`mainstay_fork.forge` has the rest
of the conversation).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

# Not called here: what a supervisor imports late is to be there before the forks.
import mainstay_agent.supervisor  # noqa: F401
from mainstay_agent import __main__ as entry
from mainstay_agent.api_client import warm_up
from mainstay_core.base.frames import Frame
from mainstay_core.base.logs import start_logging
from mainstay_fork.children import share_imports
from mainstay_fork.forge import Forge, Wanted


def _read_supervisor(frame: Frame) -> Wanted:
    """Return the supervisor that a frame wants.

    Raises:
        KeyError: the frame lacks the file for its output, or the environment.
    """
    environment = {str(name): str(value) for name, value in frame.head["environment"].items()}
    return Wanted(run=lambda: _supervise(environment), log=Path(str(frame.head["log"])))


def _supervise(environment: Mapping[str, str]) -> int:
    os.environ.update(environment)
    return entry.main([])


def main() -> int:
    """Run the forge on an inherited socket."""
    parser = argparse.ArgumentParser(
        prog="python -m mainstay_agent.forge",
        description="Imports what a supervisor needs once and forks the supervisors of local "
        "mode's pods. Ends, with all of them, when its socket ends.",
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited Unix stream socket")
    args = parser.parse_args()
    start_logging("info")
    warm_up()
    share_imports()
    # A session for each, so that a kernel that shares the processor by sessions serves each alike.
    return Forge(socket.socket(fileno=args.fd), _read_supervisor, new_sessions=True).run()


if __name__ == "__main__":
    sys.exit(main())
