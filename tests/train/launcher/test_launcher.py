"""Launcher and forge with real processes; the test is the supervisor, the trainers are fake."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.supervisor.launcher import EXIT_SUPERVISOR_GONE
from mainstay_fork.children import fork
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.launcher.forge import niceness_of

pytest.importorskip("torch")

ADDRESS = "127.0.0.1"
TRAINERS = 3
"""Trainers that the forge is told to weigh as one process."""
CONFIG = JobConfig(
    job=JobUid("job-1"),
    name="demo",
    shape=JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=1, seed=0
    ),
    entrypoint="none:none",
    workload={},
)


class Line:
    """Blocking frames over a socket."""

    def __init__(self, line: socket.socket) -> None:
        self.socket = line
        self._parser = FrameParser()
        self._frames: list[Frame] = []

    def send(self, **head: Any) -> None:
        self.socket.sendall(pack(head))

    def receive(self) -> Frame:
        while not self._frames:
            data = self.socket.recv(65536)
            assert data, "the peer is gone"
            self._frames += self._parser.feed(data)
        return self._frames.pop(0)

    def expect(self, kind: str) -> dict[str, Any]:
        frame = self.receive()
        assert frame.kind == kind, frame.head
        return frame.head

    def at_end(self) -> bool:
        """Wait for the end of the stream; False if something else comes."""
        return self.socket.recv(1) == b""


class Pod:
    """The supervisor's side of a pod: a Unix socket that launcher and trainers connect to."""

    def __init__(self, pod_dir: Path) -> None:
        self.dir = pod_dir
        self.path = str(pod_dir / "supervisor.sock")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.path)
        self._server.listen()
        self.lines: list[Line] = []

    def accept(self) -> Line:
        line = Line(self._server.accept()[0])
        self.lines.append(line)
        return line

    def settings(self, what: str, slot: int = 0, incarnation: str = "life-1") -> TrainerSettings:
        return TrainerSettings(
            config=replace(CONFIG, args=(what,)),
            pod="pod-1",
            slot=slot,
            incarnation=incarnation,
            address=ADDRESS,
            socket=self.path,
            work_dir=str(self.dir),
        )

    def fork(self, launcher: Line, what: str, slot: int = 0) -> tuple[Line, dict[str, Any]]:
        """Have a trainer forked; return its line and its hello."""
        settings = self.settings(what, slot)
        launcher.send(
            kind="fork",
            slot=slot,
            incarnation=settings.incarnation,
            settings=codec.encode(settings),
        )
        trainer = self.accept()
        hello = trainer.expect("hello")
        assert launcher.expect("forked")["pid"] == hello["pid"]
        return trainer, hello

    def close(self) -> None:
        for line in self.lines:
            line.socket.close()
        self._server.close()


@pytest.fixture
def pod_dir() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="mainstay-") as path:
        yield Path(path)


@pytest.fixture
def pod(pod_dir: Path) -> Iterator[Pod]:
    made = Pod(pod_dir)
    yield made
    made.close()


class Forge:
    """The parent's side of a forge process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        command = [sys.executable, "-m", "mainstay_train.launcher.forge"]
        self.process = subprocess.Popen(
            [
                *command,
                *("--fd", str(theirs.fileno()), "--trainer", "fake_trainers:run"),
                *("--trainers", str(TRAINERS)),
            ],
            pass_fds=[theirs.fileno()],
            env=environ,
        )
        theirs.close()
        self.line = Line(ours)
        self.line.expect("ready")

    def launch(self, pod: Pod, name: str = "pod-1") -> tuple[Line, dict[str, Any], int]:
        """Launch a launcher; return its line, its hello and its pid."""
        self.line.send(kind="launch", pod=name, pod_dir=str(pod.dir), socket=pod.path)
        pid = int(self.line.expect("launched")["pid"])
        launcher = pod.accept()
        return launcher, launcher.expect("launcher-hello"), pid

    def close(self) -> None:
        self.line.socket.close()
        self.process.wait()


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    made = Forge()
    yield made
    made.close()


@pytest.fixture
def launcher(forge: Forge, pod: Pod) -> Iterator[Line]:
    line, _, pid = forge.launch(pod)
    yield line
    pod.close()
    assert forge.line.expect("exited")["pid"] == pid


def has_ended(pid: int) -> bool:
    """Wait until a process that is not our child has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with ExitStack() as stack:
        stack.callback(os.close, pidfd)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(60_000))


def test_a_process_with_another_thread_is_never_forked() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(MainstayError, match=r"cannot fork a process with \d+ threads: \w"):
            fork(lambda: 0, None, [])
    finally:
        over.set()
        other.join()


def test_a_forked_trainer_has_one_thread_and_the_settings_it_was_sent(
    pod: Pod, launcher: Line
) -> None:
    trainer, hello = pod.fork(launcher, "torch")
    assert (hello["slot"], hello["incarnation"]) == (0, "life-1")
    assert hello["fingerprint"] == {"threads": "1"}
    assert trainer.expect("log")["text"] == "1 demo"


def test_a_trainer_inherits_no_socket_of_its_parents(pod: Pod, launcher: Line) -> None:
    pod.fork(launcher, "wait", slot=1)
    trainer, _ = pod.fork(launcher, "fds", slot=0)
    names = trainer.expect("log")["text"].splitlines()
    assert sum(name.startswith("socket:") for name in names) == 1, names
    assert not any("eventpoll" in name for name in names), names


@pytest.mark.parametrize(
    ("what", "code", "number"),
    [("exit:0", 0, None), ("exit:10", 10, None), ("raise", 1, None), ("die:9", None, 9)],
)
def test_the_end_of_a_trainer_is_reported_with_its_code_or_signal(
    pod: Pod, launcher: Line, what: str, code: int | None, number: int | None
) -> None:
    trainer, hello = pod.fork(launcher, what)
    assert trainer.at_end()
    exited = launcher.expect("exited")
    assert exited == {
        "kind": "exited",
        "slot": 0,
        "pid": hello["pid"],
        "incarnation": "life-1",
        "code": code,
        "signal": number,
    }
    assert ("a bug in the workload" in (pod.dir / "trainer-0.log").read_text()) == (what == "raise")


def test_the_log_of_a_trainer_that_crashed_in_native_code_says_where_it_was(
    pod: Pod, launcher: Line
) -> None:
    trainer, _ = pod.fork(launcher, f"die:{int(signal.SIGSEGV)}")
    assert trainer.at_end()
    assert launcher.expect("exited")["signal"] == signal.SIGSEGV
    log = (pod.dir / "trainer-0.log").read_text()
    assert "Segmentation fault" in log
    assert "fake_trainers.py" in log


def test_a_slot_can_be_forked_again(pod: Pod, launcher: Line) -> None:
    _, first = pod.fork(launcher, "exit:1")
    assert launcher.expect("exited")["code"] == 1
    _, second = pod.fork(launcher, "wait")
    assert second["pid"] != first["pid"]


def test_a_signal_reaches_the_trainer_of_the_slot_only(pod: Pod, launcher: Line) -> None:
    trainers = [pod.fork(launcher, "wait", slot=slot) for slot in range(2)]
    launcher.send(kind="signal", slot=1, signal=int(signal.SIGKILL))
    exited = launcher.expect("exited")
    assert (exited["slot"], exited["signal"]) == (1, signal.SIGKILL)
    trainers[0][0].send(kind="stop")
    assert launcher.expect("exited")["slot"] == 0


def test_a_launcher_ends_with_its_supervisor_and_takes_its_trainers_along(
    forge: Forge, pod: Pod
) -> None:
    line, _, pid = forge.launch(pod)
    _, hello = pod.fork(line, "wait")
    line.socket.close()
    exited = forge.line.expect("exited")
    assert (exited["pid"], exited["code"]) == (pid, EXIT_SUPERVISOR_GONE)
    assert has_ended(hello["pid"])


def test_a_stopped_launcher_waits_for_its_trainers(forge: Forge, pod: Pod) -> None:
    line, _, _ = forge.launch(pod)
    trainer, _ = pod.fork(line, "wait")
    line.send(kind="stop")
    trainer.send(kind="stop")
    assert line.expect("exited")["code"] == 0
    assert forge.line.expect("exited")["code"] == 0


def test_a_launcher_told_to_end_tells_its_supervisor_and_goes_on(forge: Forge, pod: Pod) -> None:
    line, _, pid = forge.launch(pod)
    os.kill(pid, signal.SIGTERM)
    line.expect("leaving")
    trainer, _ = pod.fork(line, "wait")
    line.send(kind="stop")
    trainer.send(kind="stop")
    assert forge.line.expect("exited")["code"] == 0


def test_killing_a_launcher_kills_its_trainers(forge: Forge, pod: Pod) -> None:
    line, _, pid = forge.launch(pod)
    trainer, hello = pod.fork(line, "wait")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children == [str(hello["pid"])], "trainers are all that it forks"
    os.kill(pid, signal.SIGKILL)
    assert forge.line.expect("exited")["code"] == -signal.SIGKILL
    assert trainer.at_end()
    assert has_ended(hello["pid"])


def test_all_trainers_share_one_session_and_weigh_no_more_than_one_process(
    forge: Forge, pod: Pod
) -> None:
    line, _, pid = forge.launch(pod)
    _, hello = pod.fork(line, "wait")
    assert os.getsid(pid) == os.getsid(hello["pid"]) == os.getsid(forge.process.pid)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    # A niceness has an end, where tests may be already.
    expected = min(19, own + niceness_of(TRAINERS))
    assert os.getpriority(os.PRIO_PROCESS, hello["pid"]) == expected
    os.kill(pid, signal.SIGKILL)
    assert forge.line.expect("exited")["pid"] == pid


@pytest.mark.parametrize(("num_trainers", "niceness"), [(1, 0), (2, 4), (3, 5), (8, 10), (64, 19)])
def test_the_more_trainers_a_run_has_the_less_each_weighs(num_trainers: int, niceness: int) -> None:
    assert niceness_of(num_trainers) == niceness
    assert niceness_of(num_trainers + 1000) == 19


def test_a_pod_is_killed_by_name_as_a_process_group(forge: Forge, pod: Pod) -> None:
    line, _, pid = forge.launch(pod, "pod-7")
    _, hello = pod.fork(line, "wait")
    assert os.getpgid(pid) == os.getpgid(hello["pid"]) == pid
    forge.line.send(kind="kill", pod="pod-7")
    assert forge.line.expect("exited") == {
        "kind": "exited",
        "pod": "pod-7",
        "pid": pid,
        "code": -signal.SIGKILL,
    }
    assert has_ended(hello["pid"])


@pytest.mark.parametrize("how", ["line closes", "killed"])
def test_nothing_outlives_the_forge(pod: Pod, how: str) -> None:
    forge = Forge()
    line, _, pid = forge.launch(pod)
    _, hello = pod.fork(line, "wait")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if how == "killed":
        forge.process.kill()
    else:
        forge.line.socket.close()
    forge.close()
    assert all(has_ended(int(each)) for each in [pid, hello["pid"], *children])


def test_a_trainer_that_cannot_be_found_is_refused_by_name(pod: Pod) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-m", "mainstay_train.launcher", "--socket", pod.path],
            *["--pod-dir", str(pod.dir), "--trainer", "json:no_such_function"],
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 2
    assert "json:no_such_function" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_container_what_trainers_print_is_the_containers_output(pod: Pod) -> None:
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-m", "mainstay_train.launcher", "--socket", pod.path]
    command += ["--pod-dir", str(pod.dir), "--trainer", "fake_trainers:run"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        launcher = pod.accept()
        launcher.expect("launcher-hello")
        for slot in range(2):
            pod.fork(launcher, f"print:it {slot}", slot)
            assert launcher.expect("exited")["code"] == 0
        launcher.send(kind="stop")
        output = process.communicate()[0].splitlines()
    assert process.returncode == 0
    for slot in range(2):
        lines = [line for line in output if line.startswith(f"[slot {slot}] ")]
        assert lines == [
            f"[slot {slot}] said it {slot}",
            f"[slot {slot}] by a child",
            f"[slot {slot}] without an end",
        ]
    assert not list(pod.dir.glob("*.log"))
