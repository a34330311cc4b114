"""``python -m mainstay_api`` as a process: its port, its end, its refusals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.api.conftest import wait_for_line

TOKEN = "one-token"


def environment(redis_url: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "MAINSTAY_REDIS_URL": redis_url,
        "MAINSTAY_TOKEN": TOKEN,
        "MAINSTAY_API_PORT": "0",
        **more,
    }


def test_it_says_its_port_serves_and_ends_with_0_on_sigterm(
    shared_redis: Any, tmp_path: Path
) -> None:
    port_file = tmp_path / "port"
    process = subprocess.Popen(
        [sys.executable, "-m", "mainstay_api", "--port-file", str(port_file)],
        env=environment(shared_redis.url),
        stderr=subprocess.PIPE,
    )
    try:
        wait_for_line(process.stderr, b"serving on http://")
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            # The socket listens before the application does: the first request waits.
            assert client.get("/readyz").status_code == 200
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert client.get("/v1/jobs", headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_port_in_use_is_one_clear_message(shared_redis: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "mainstay_api"],
            env=environment(shared_redis.url, MAINSTAY_API_PORT=str(port)),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
