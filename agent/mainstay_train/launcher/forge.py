"""The forge of local mode: one process with torch imported, from which launchers are forked.

Many pods on one machine would import torch once each, two to four seconds of
CPU apiece. The forge imports it once and forks a launcher per pod, each the
leader of its own process group, so that killing the group kills what would be
the pod's trainer container. All of them stay in the forge's session: a kernel
that shares the processor by sessions (autogroup) gives all trainers together
as much as the api, and niceness counts among processes of one session alone.

It speaks frames on an inherited Unix socket (``--fd``):

* in: ``launch {pod, pod_dir, address, socket?}`` (the socket is ``POD_DIR/supervisor.sock``
  unless named), ``kill {pod}``
* out: ``ready {pid}`` after the imports, ``launched {pod, pid}``,
  ``exited {pod, pid, code}`` (negative: the signal that ended it),
  ``refused {pod, reason}``

It ends when the socket ends, and everything that it forked ends with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_train.base.settings import DEFAULT_TRAINER, LauncherSettings
from mainstay_train.launcher import forking
from mainstay_train.launcher.launcher import READ_BYTES, run_launcher

NICE_STEP = 1.25
"""What one step of niceness divides a process's weight by (sched(7))."""
MAX_NICENESS = 19

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    pid: int
    pidfd: int


def niceness_of(num_trainers: int) -> int:
    """Return the niceness with which all trainers of a run together weigh no more than one process.

    In local mode they share a few cores with Redis, the api and the supervisors, for whose few
    milliseconds of work every recovery waits. What nobody else wants is theirs all the same.
    """
    needed = (n for n in range(MAX_NICENESS) if num_trainers <= NICE_STEP**n)
    return next(needed, MAX_NICENESS)


class Forge:
    """Forks, kills and reaps launchers.

    Invariant: ``_pods`` holds the launchers that were forked and not yet reaped,
    by pidfd, each the leader of a process group.
    """

    def __init__(self, line: socket.socket, trainer: str) -> None:
        self._line = line
        self._trainer = trainer
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
                forking.reap(pod.pid)

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
        pod_dir = str(frame.head["pod_dir"])
        settings = LauncherSettings(
            pod=pod,
            pod_dir=pod_dir,
            socket=str(frame.head.get("socket") or Path(pod_dir) / "supervisor.sock"),
            trainer=self._trainer,
        )
        give_up: list[forking.Closable] = [self._line, self._selector]
        try:
            pid = forking.fork(
                lambda: self._become_launcher(settings),
                Path(settings.pod_dir) / "launcher.log",
                give_up,
                new_group=True,
            )
        except (MainstayError, OSError) as error:
            self._send({"kind": "refused", "pod": pod, "reason": str(error)})
            return
        running = _Pod(pod, pid, os.pidfd_open(pid))
        self._pods[running.pidfd] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ)
        self._send({"kind": "launched", "pod": pod, "pid": pid})

    def _become_launcher(self, settings: LauncherSettings) -> int:
        for pidfd in self._pods:
            os.close(pidfd)
        try:
            return run_launcher(settings)
        except MainstayError as error:
            logger.error("%s", error)
            return 2

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
        code, number = forking.reap(pod.pid)
        code = code if number is None else -number
        self._send({"kind": "exited", "pod": pod.name, "pid": pod.pid, "code": code})

    def _send(self, head: dict[str, object]) -> None:
        self._line.sendall(pack(head))


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
    forking.log_to_stderr()
    line = socket.socket(fileno=args.fd)
    try:
        forking.warm_up([args.trainer.partition(":")[0], *args.preload])
        forking.resolve(args.trainer)
    except (MainstayError, ImportError) as error:
        logger.error("%s", error)
        return 2
    os.nice(niceness_of(args.trainers))
    return Forge(line, args.trainer).run()


if __name__ == "__main__":
    sys.exit(main())
