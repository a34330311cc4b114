"""Stores of segments: in threads of the test, and as processes that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.core.segments.keys import JOB

from mainstay_agent.snapshots.store import SegmentStore
from mainstay_core.base.ids import PodUid
from mainstay_core.segments.frames import SOCKET_NAME
from mainstay_core.wire.segments import Holder
from mainstay_core.wire.stores import StoreCheck
from mainstay_train.base import job_secret
from mainstay_train.state.segments import SegmentClient

HOST = "127.0.0.1"
SECRET = "known to the job's pods"
MIB = 1 << 20

PROCESS = f"""
import sys
from pathlib import Path
from mainstay_agent.snapshots.store import SegmentStore
store = SegmentStore(
    job="{JOB}", pod=sys.argv[1], address="{HOST}", path=Path(sys.argv[2]),
    memory_bytes=int(sys.argv[3]), secret="{SECRET}",
)
print(store.address, flush=True)
store.serve()
"""


@dataclass(frozen=True)
class Pod:
    """A pod's store, wherever it runs."""

    holder: Holder
    path: str
    store: Any
    """The store of a thread, or the process of one."""

    @property
    def uid(self) -> str:
        return self.holder.pod


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pods of the test share a secret."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    monkeypatch.setenv("MAINSTAY_SECRET_FILE", str(file))
    job_secret.read.cache_clear()
    yield
    job_secret.read.cache_clear()


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path must stay below 108 characters.
    with tempfile.TemporaryDirectory(prefix="mainstay-") as path:
        yield Path(path)


@pytest.fixture
def make_store(directory: Path) -> Iterator[Callable[..., Pod]]:
    """Make stores that run in threads of the test; they end with it, without an error."""
    stores: list[tuple[SegmentStore, threading.Thread]] = []
    errors: list[BaseException] = []

    def make(name: str = "a", memory_bytes: int = 4 * MIB, **more: Any) -> Pod:
        (directory / name).mkdir(exist_ok=True)
        path = directory / name / SOCKET_NAME
        given = {"job": JOB, "secret": SECRET, **more}
        store = SegmentStore(
            pod=PodUid(name), address=HOST, path=path, memory_bytes=memory_bytes, **given
        )

        def serve() -> None:
            try:
                store.serve()
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=serve)
        thread.start()
        stores.append((store, thread))
        return Pod(Holder(pod=PodUid(name), address=store.address), str(path), store)

    yield make
    for store, thread in stores:
        store.close()
        thread.join()
    assert errors == []


@pytest.fixture
def start_store(directory: Path) -> Iterator[Callable[..., Pod]]:
    """Start stores as processes."""
    processes: list[subprocess.Popen[str]] = []

    def start(name: str, memory_bytes: int = 4 * MIB) -> Pod:
        (directory / name).mkdir(exist_ok=True)
        path = str(directory / name / SOCKET_NAME)
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, name, path, str(memory_bytes)],
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        return Pod(Holder(pod=PodUid(name), address=address), path, process)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def make_client() -> Iterator[Callable[..., SegmentClient]]:
    """Make clients of stores, as trainers have them."""
    clients: list[SegmentClient] = []

    def make(pod: Pod, slot: int = 0) -> SegmentClient:
        clients.append(SegmentClient(pod.path, slot, f"life-{len(clients)}", HOST))
        return clients[-1]

    yield make
    for client in clients:
        client.shutdown("the test is over")


def done_check(pod: Pod, number: int) -> StoreCheck:
    """The outcome of a store's check."""
    while (check := pod.store.ask(number).result().checked) is None or check.number < number:
        pass
    return check
