"""The forge of trainers, in local mode: one process with torch imported, which forks launchers.

Many pods on one machine would import torch once each, two to four seconds of CPU apiece. All
launchers and trainers stay in the forge's session: a kernel that shares the processor by sessions
(autogroup) gives all trainers together as much as the api, and niceness counts among processes of
one session alone.

``launch`` says ``pod``, ``pod_dir`` and, unless it is ``POD_DIR/supervisor.sock``, ``socket``
(:mod:`mainstay_fork.forge` has the rest of the conversation).
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import Frame
from mainstay_fork.forge import Forge, Wanted
from mainstay_train.base.settings import DEFAULT_TRAINER, LauncherSettings
from mainstay_train.launcher import warming
from mainstay_train.launcher.launcher import run_launcher

NICE_STEP = 1.25
"""What one step of niceness divides a process's weight by (sched(7))."""
MAX_NICENESS = 19

logger = logging.getLogger(__name__)


def niceness_of(num_trainers: int) -> int:
    """Return the niceness with which all trainers of a run together weigh no more than one process.

    In local mode they share a few cores with Redis, the api and the supervisors, for whose few
    milliseconds of work every recovery waits. What nobody else wants is theirs all the same.
    """
    needed = (n for n in range(MAX_NICENESS) if num_trainers <= NICE_STEP**n)
    return next(needed, MAX_NICENESS)


def _read_launcher(frame: Frame, trainer: str) -> Wanted:
    """Return the launcher that a frame wants.

    Raises:
        KeyError: the frame does not say where the pod's directory is.
    """
    pod_dir = Path(str(frame.head["pod_dir"]))
    settings = LauncherSettings(
        pod=str(frame.head.get("pod", "")),
        pod_dir=str(pod_dir),
        socket=str(frame.head.get("socket") or pod_dir / "supervisor.sock"),
        trainer=trainer,
    )
    return Wanted(run=lambda: _launch(settings), log=pod_dir / "launcher.log")


def _launch(settings: LauncherSettings) -> int:
    try:
        return run_launcher(settings)
    except MainstayError as error:
        logger.error("%s", error)
        return 2


def main() -> int:
    """Run the forge on an inherited socket."""
    parser = argparse.ArgumentParser(
        prog="python -m mainstay_train.launcher.forge",
        description="Imports torch once and forks the launchers of local mode's pods. "
        "Ends, with all of them, when its socket ends.",
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited Unix stream socket")
    parser.add_argument(
        "--trainer", default=DEFAULT_TRAINER, help="module:function of a trainer (%(default)s)"
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it before forking; may be repeated",
    )
    parser.add_argument(
        "--trainers",
        type=int,
        default=1,
        help="trainers that run at a time: the more, the less each weighs (%(default)s)",
    )
    args = parser.parse_args()
    warming.log_to_stderr()
    line = socket.socket(fileno=args.fd)
    try:
        warming.warm_up([args.trainer.partition(":")[0], *args.preload])
        warming.resolve(args.trainer)
    except (MainstayError, ImportError) as error:
        logger.error("%s", error)
        return 2
    os.nice(niceness_of(args.trainers))
    return Forge(line, lambda frame: _read_launcher(frame, args.trainer)).run()


if __name__ == "__main__":
    sys.exit(main())
