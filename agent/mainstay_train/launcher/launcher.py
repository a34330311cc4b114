"""The launcher of one pod: a warm parent with torch imported, from which trainers are forked.

Importing torch costs seconds; a fork costs milliseconds. The launcher never
touches a device nor starts a thread, so it can fork for as long as the pod
lives, and outlives its trainers. It does what its supervisor says over the
supervisor's Unix socket and ends, with all its children, when that socket ends. Told to end
itself (SIGTERM), it tells its supervisor and goes on: the pod's work is handed
over first.

In Kubernetes: ``python -m mainstay_train.launcher``; in local mode the forge
forks it. The code is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import Incarnation
from mainstay_core.supervisor.events import Exited, Forked
from mainstay_core.supervisor.launcher import (
    EXIT_SUPERVISOR_GONE,
    Child,
    End,
    EndAsked,
    Event,
    ForkAsked,
    ForkChild,
    LauncherState,
    Report,
    ReportLeaving,
    SignalAsked,
    SignalChild,
    StopAsked,
    SupervisorLost,
    step,
)
from mainstay_fork import children
from mainstay_train.base.output import Relay
from mainstay_train.base.settings import (
    DEFAULT_PRELOAD,
    DEFAULT_TRAINER,
    LauncherSettings,
    TrainerSettings,
)
from mainstay_train.launcher import warming

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 16
CONNECT_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class _Process:
    """A trainer's process."""

    child: Child
    pidfd: int


class Launcher:
    """Forks, signals and reaps the trainers of one pod, as its state machine decides.

    Invariant: ``_processes`` holds the trainers that were forked and not yet reaped,
    each registered with the selector by its pidfd.

    Args:
        settings: where the pod and its supervisor are.
        give_up: what children must close beyond the launcher's own things.
    """

    def __init__(
        self, settings: LauncherSettings, give_up: Iterable[children.Closable] = ()
    ) -> None:
        self._settings = settings
        self._run_trainer = warming.resolve(settings.trainer)
        self._give_up = tuple(give_up)
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector)
        self._state = LauncherState()
        self._exit_code: int | None = None
        self._processes: dict[int, _Process] = {}
        self._parser = FrameParser()
        self._supervisor: socket.socket | None = None
        self._told_to_end, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)

    def run(self) -> int:
        """Serve the supervisor until it ends or says stop; return the exit code."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._supervisor = _connect(self._settings)
            self._selector.register(self._supervisor, selectors.EVENT_READ)
            self._selector.register(self._told_to_end, selectors.EVENT_READ)
            self._send({"kind": "launcher-hello", "pid": os.getpid()})
            return self._serve()
        except (BrokenPipeError, ConnectionError):
            return EXIT_SUPERVISOR_GONE
        finally:
            self._kill_all()

    def _on_sigterm(self, number: int, _frame: object) -> None:
        """A container's main process is told to end: its supervisor hands the work over first."""
        # As the first process of a container, the default would be to ignore it.
        if self._supervisor is None:
            raise SystemExit(128 + number)
        # Not from here: another frame may be half sent. A full buffer has told it already.
        with contextlib.suppress(BlockingIOError):
            self._wakes.send(b"x")

    def _serve(self) -> int:
        while True:
            for key, _ in self._selector.select():
                self._on_ready(key)
                if self._exit_code is not None:
                    return self._exit_code

    def _on_ready(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._supervisor:
            self._receive()
        elif key.fileobj is self._told_to_end:
            self._told_to_end.recv(READ_BYTES)
            self._feed(EndAsked())
        elif key.fd in self._processes:
            self._reap(self._processes[key.fd])
        elif self._relay.has(key.fd):
            self._relay.pass_on(key.fd)

    def _receive(self) -> None:
        assert self._supervisor is not None
        data = self._supervisor.recv(READ_BYTES)
        if not data:
            self._feed(SupervisorLost())
        for frame in self._parser.feed(data):
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        head = frame.head
        if frame.kind == "fork":
            settings = codec.decode(TrainerSettings, head["settings"])
            asked = ForkAsked(int(head["slot"]), Incarnation(settings.incarnation))
            self._feed(asked, settings)
        elif frame.kind == "signal":
            self._feed(SignalAsked(int(head["slot"]), int(head["signal"])))
        elif frame.kind == "stop":
            self._feed(StopAsked())
        else:
            logger.warning("the supervisor sent an unknown frame: %s", frame.kind)

    def _feed(self, event: Event, settings: TrainerSettings | None = None) -> None:
        """Have the state machine decide, and carry out what it says."""
        done = step(self._state, event)
        self._state = done.state
        for action in done.actions:
            match action:
                case ForkChild():
                    assert settings is not None
                    self._fork(action, settings)
                case SignalChild(child=child, number=number):
                    for process in self._processes.values():
                        if process.child == child:
                            signal.pidfd_send_signal(process.pidfd, number)
                case Report():
                    self._report(action)
                case ReportLeaving():
                    self._send({"kind": "leaving"})
                case End(exit_code=code):
                    self._exit_code = code
                    logger.log(logging.ERROR if code else logging.INFO, "%s", done.reason)

    def _fork(self, action: ForkChild, settings: TrainerSettings) -> None:
        relayed = self._relay.open(f"slot {action.slot}") if self._settings.relay else None
        log = Path(settings.work_dir) / f"trainer-{action.slot}.log" if relayed is None else relayed
        pid = children.fork(lambda: self._train(settings), log, self._inherited())
        if relayed is not None:
            os.close(relayed)
        child = Child(action.slot, action.incarnation, pid)
        process = _Process(child, os.pidfd_open(pid))
        self._processes[process.pidfd] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ)
        self._feed(Forked(action.slot, action.incarnation, pid))

    def _train(self, settings: TrainerSettings) -> int:
        import torch

        faulthandler.enable()  # its log says where it was when native code crashed
        for pidfd in tuple(self._processes):
            os.close(pidfd)
        torch.set_num_threads(1)
        return int(self._run_trainer(settings))

    def _inherited(self) -> list[children.Closable]:
        """What no child may keep open."""
        assert self._supervisor is not None
        return [
            self._selector,
            self._supervisor,
            self._told_to_end,
            self._wakes,
            self._relay,
            *self._give_up,
        ]

    def _reap(self, process: _Process) -> None:
        self._drop(process)
        child = process.child
        code, number = children.reap(child.pid)
        self._feed(Exited(child.slot, child.incarnation, code, number))

    def _report(self, report: Report) -> None:
        what = report.what
        told = {"slot": what.slot, "pid": report.pid, "incarnation": what.incarnation}
        if isinstance(what, Forked):
            self._send({"kind": "forked", **told})
        else:
            self._send({"kind": "exited", **told, "code": what.code, "signal": what.signal})

    def _drop(self, process: _Process) -> None:
        del self._processes[process.pidfd]
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)

    def _send(self, head: dict[str, object]) -> None:
        assert self._supervisor is not None
        self._supervisor.sendall(pack(head))

    def _kill_all(self) -> None:
        for process in tuple(self._processes.values()):
            os.kill(process.child.pid, signal.SIGKILL)
            self._drop(process)
            children.reap(process.child.pid)
        self._relay.drain()


def run_launcher(settings: LauncherSettings, give_up: Iterable[children.Closable] = ()) -> int:
    """Be the launcher of one pod; return the exit code.

    Torch must be imported already, and this process must have one thread.

    Raises:
        InvalidSpecError: the trainer function cannot be found.
        MainstayError: the supervisor's socket did not appear in time.
    """
    return Launcher(settings, give_up).run()


def _connect(settings: LauncherSettings) -> socket.socket:
    """Connect to the supervisor, which may still be starting."""
    deadline = time.monotonic() + settings.connect_s
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(settings.socket)
            return line
        except (FileNotFoundError, ConnectionRefusedError) as error:
            line.close()
            if time.monotonic() > deadline:
                raise MainstayError(
                    f"no supervisor at {settings.socket} after {settings.connect_s:g} s"
                ) from error
            time.sleep(CONNECT_RETRY_S)
        except PermissionError as error:
            line.close()
            raise MainstayError(
                f"{settings.socket} belongs to another user; give the pod a securityContext.fsGroup"
            ) from error


def main() -> int:
    """Run the launcher of a pod as a process of its own (in Kubernetes)."""
    parser = argparse.ArgumentParser(
        prog="python -m mainstay_train.launcher",
        description="Warm parent of a pod's trainers: imports torch once, forks one trainer per "
        "slot as its supervisor says. Ends with its supervisor.",
    )
    pod_dir = os.environ.get("MAINSTAY_POD_DIR", "/run/mainstay")
    parser.add_argument("--pod", default=os.environ.get("MAINSTAY_POD", ""), help="UID of the pod")
    parser.add_argument("--pod-dir", default=pod_dir, help="the pod's directory (%(default)s)")
    parser.add_argument("--socket", help="supervisor's Unix socket (POD_DIR/supervisor.sock)")
    parser.add_argument(
        "--trainer",
        default=DEFAULT_TRAINER,
        help="module:function that a forked child runs (%(default)s)",
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=os.environ.get("MAINSTAY_PRELOAD", DEFAULT_PRELOAD).split(),
        metavar="MODULE",
        help="import it before forking; may be repeated [MAINSTAY_PRELOAD, parted by spaces; "
        f"{DEFAULT_PRELOAD}: torch's own optimizers import it]",
    )
    args = parser.parse_args()
    warming.log_to_stderr()
    try:
        warming.warm_up([args.trainer.partition(":")[0], *args.preload])
        return run_launcher(
            LauncherSettings(
                pod=args.pod,
                pod_dir=args.pod_dir,
                socket=args.socket or str(Path(args.pod_dir) / "supervisor.sock"),
                trainer=args.trainer,
                relay=True,
            )
        )
    except (MainstayError, ImportError) as error:
        logger.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
