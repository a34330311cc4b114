"""Runs an api and a Redis of its own, without any job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from mainstay_cli.local.preflight import find_redis_server
from mainstay_cli.local.redis_server import redis_command

POLL_S = 0.05


@dataclass(frozen=True)
class ServedApi:
    """The processes of an api and of its store, and where it serves."""

    process: subprocess.Popen[bytes]
    redis: subprocess.Popen[bytes]
    port: int


@contextlib.contextmanager
def served_api(environment: Mapping[str, str]) -> Iterator[ServedApi]:
    """Serve until the block ends.

    Args:
        environment: settings of the api, beside where its store is.

    Raises:
        RuntimeError: one of the two ended instead.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        socket, port_file = directory / "redis.sock", directory / "port"
        log = stack.enter_context((directory / "log").open("wb"))

        def start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env={**variables}, stdout=log, stderr=log)
            stack.callback(_end, process)
            return process

        def wait_for(process: subprocess.Popen[bytes], file: Path) -> None:
            while not file.exists():
                if process.poll() is not None:
                    raise RuntimeError((directory / "log").read_text())
                time.sleep(POLL_S)

        store = start(redis_command(find_redis_server(), directory, socket), os.environ)
        wait_for(store, socket)
        redis.Redis(unix_socket_path=str(socket)).ping()
        command = [sys.executable, "-m", "mainstay_api", "--port-file", str(port_file)]
        settings = {**environment, "MAINSTAY_REDIS_URL": f"unix://{socket}"}
        api = start(command, {**os.environ, "MAINSTAY_LOG_LEVEL": "error", **settings})
        wait_for(api, port_file)
        yield ServedApi(api, store, int(port_file.read_text()))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
