"""Launcher and supervisor as containers of their own: each may end and come again, alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mainstay_agent.settings import SupervisorSettings
from mainstay_agent.token import Token
from mainstay_core.supervisor.health import HEALTH_FILE, STALE_S, probe_command


def check(pod: Any, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mainstay_agent", "--check", what, "--pod-dir", str(pod.dir)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def probe(pod: Any, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an exec probe as a cluster's pod has it; by itself it finds no Python."""
    return subprocess.run(
        probe_command(what),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "MAINSTAY_POD_DIR": str(pod.dir), **environment},
    )


def test_another_launcher_forks_at_once_whether_or_not_the_api_is_there(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    _, first = pod.trainer(launcher)
    api.next_fact("trainer-up")
    launcher.socket.close()
    down = api.next_fact("trainer-down")
    assert (down.incarnation, down.restarting) == (first, False)
    api.close()
    assert pod.launcher().expect("fork")["incarnation"] != first


def test_the_probes_ask_the_supervisor_and_not_the_api(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    pod.trainer(launcher)
    api.next_fact("trainer-up")
    api.close()
    ready = check(pod, "ready")
    assert (ready.returncode, ready.stdout) == (0, "ok\n")
    while probe(pod, "ready").returncode != 0:
        pass  # until the supervisor has shown it
    launcher.socket.close()
    while check(pod, "ready").returncode == 0:
        pass  # until the supervisor has read the end of the launcher's line
    assert "no launcher" in check(pod, "ready").stdout
    while probe(pod, "ready").returncode == 0:
        pass
    assert probe(pod, "ready").stdout == "no launcher is connected\n"
    assert check(pod, "live").returncode == probe(pod, "live").returncode == 0
    pod.process.kill()
    pod.process.wait()
    dead = check(pod, "live")
    assert dead.returncode == 1
    assert "does not answer" in dead.stdout
    # What it has shown last is soon too old; without the file the supervisor is asked.
    os.utime(pod.dir / HEALTH_FILE, (0, time.time() - STALE_S - 1))
    for what in ("live", "ready"):
        assert "has not shown for" in probe(pod, what).stdout
    (pod.dir / HEALTH_FILE).unlink()
    python = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    asked = probe(pod, "live", **python, PYTHONPATH=os.pathsep.join(sys.path))
    assert (asked.returncode, asked.stdout) == (1, dead.stdout)


def test_a_supervisor_that_comes_again_is_another_one(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    pod.trainer(launcher)
    first = api.next("pods")
    assert api.next("facts")["supervisor"] == first["supervisor"]
    pod.process.send_signal(signal.SIGKILL)
    pod.process.wait()
    assert launcher.at_end()
    again = make_pod(directory=pod.dir, uid=pod.uid)
    assert again.socket == pod.socket
    again.launcher().expect("fork")
    second = api.next("pods")
    assert second["pod"] == first["pod"]
    assert second["supervisor"] != first["supervisor"]


def test_the_socket_is_shared_with_the_group_of_a_volume_that_hands_it_on(make_pod: Any) -> None:
    private = make_pod()
    private.connect()
    assert Path(private.socket).stat().st_mode & 0o777 == 0o700
    shared = make_pod(mode=0o2770)
    shared.connect()
    assert Path(shared.socket).stat().st_mode & 0o777 == 0o770


@pytest.fixture
def settings(tmp_path: Path) -> SupervisorSettings:
    (tmp_path / "token").write_text("first\n")
    return SupervisorSettings(
        api_url="http://127.0.0.1:1",
        job="j",
        pod="p",
        pod_name="p",
        address="127.0.0.1",
        pod_dir=tmp_path,
        token_file=tmp_path / "token",
    )


def test_a_token_that_is_replaced_is_presented_at_once(
    settings: SupervisorSettings, tmp_path: Path
) -> None:
    token = Token(settings)
    assert token.header == "Bearer first"
    # As the kubelet does it: another file takes the name.
    (tmp_path / "next").write_text("second\n")
    (tmp_path / "next").rename(tmp_path / "token")
    assert token.header == "Bearer second"
    (tmp_path / "token").unlink()
    assert token.header == "Bearer second"
    (tmp_path / "token").write_text("third\n")
    assert token.header == "Bearer third"


def test_a_refused_token_is_read_again(settings: SupervisorSettings, tmp_path: Path) -> None:
    token = Token(settings)
    before = (tmp_path / "token").stat()
    (tmp_path / "token").write_text("other\n")
    os.utime(tmp_path / "token", ns=(before.st_atime_ns, before.st_mtime_ns))
    token.read_again()
    assert token.header == "Bearer other"
