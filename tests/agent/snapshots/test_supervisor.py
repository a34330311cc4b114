"""A supervisor keeps its pod's segments, or says at the start why it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.agent.conftest import JOB
from tests.agent.snapshots.conftest import HOST, MIB, SECRET
from tests.agent.snapshots.test_store import read, write
from tests.core.segments.keys import key_of

from mainstay_agent import settings as supervisor_settings
from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.supervisor.leaving import EXIT_TERMINATED
from mainstay_core.wire.facts import PodRegistration
from mainstay_core.wire.segments import Holder
from mainstay_core.wire.stores import StoreStatus
from mainstay_train.state.segments import SegmentClient, socket_beside


def registration_of(api: Any, pod: Any) -> PodRegistration:
    pod.launcher().expect("fork")
    return codec.decode(PodRegistration, api.next("pods"))


def test_pods_with_memory_for_segments_register_where_they_serve_them(
    api: Any, make_pod: Any, tmp_path: Path
) -> None:
    api.config = replace(api.config, snapshots=SnapshotConfig(memory_bytes=4 * MIB))
    given = {
        "MAINSTAY_SNAPSHOT_MEMORY": str(4 * MIB),
        "MAINSTAY_SECRET_FILE": str(tmp_path / "secret"),
    }
    assert (tmp_path / "secret").read_text() == SECRET
    pods = [make_pod(**given) for _ in range(2)]
    told = [registration_of(api, pod) for pod in pods]
    clients = [SegmentClient(socket_beside(p.socket), 0, "life", HOST) for p in pods]
    holders = [Holder(pod=r.pod, address=r.snapshots) for r in told]

    api.answers["store"] = [(503, {}), (200, {"check": 1}), (200, {"check": 1})]
    write(clients[0], key_of(3), b"bytes", holders, job=JOB)

    assert clients[0].wait_held([key_of(3)]) == ""
    assert clients[1].report(0).pod == pods[1].uid
    assert read(clients[1], key_of(3), (), 5)[1] == b"bytes"
    # A status that is not heard ends nothing, and a check that is wanted is told once.
    while (told := codec.decode(StoreStatus, api.next("store"))).checked is None:
        assert Holder(pod=told.pod, address=told.address) in holders
    assert told.checked.number == 1
    for pod in pods:
        pod.lines[0].socket.close()  # its launcher, whose trainers it would wait for
        pod.process.send_signal(signal.SIGINT)
        assert pod.process.wait() == EXIT_TERMINATED, pod.log


def test_a_pod_of_a_job_without_snapshots_serves_none(api: Any, make_pod: Any) -> None:
    pod = make_pod()

    told = api.next("pods") if pod.launcher().expect("fork") else None

    assert "snapshots" not in told
    assert not Path(socket_beside(pod.socket)).exists()
    for _ in range(3):
        assert api.next("heartbeats").keys() == {"pod", "slots", "quorum"}
    assert "store" not in api.seen


def test_a_pod_whose_memory_is_not_there_ends_before_it_registers(api: Any, make_pod: Any) -> None:
    pod = make_pod(MAINSTAY_SNAPSHOT_MEMORY=str(1 << 40))

    assert pod.process.wait() == 1
    assert "spec.snapshots.memory: is 1.0 TiB, but the memory that is left" in pod.log
    assert api.inbox("pods").empty()


def test_a_pod_that_was_started_without_memory_for_a_job_with_snapshots_says_so(
    api: Any, make_pod: Any
) -> None:
    api.config = replace(api.config, snapshots=SnapshotConfig(memory_bytes=4 * MIB))
    pod = make_pod()

    assert registration_of(api, pod).snapshots == ""
    assert "this pod was started without memory for them" in pod.log


@pytest.mark.parametrize("memory", ["much", "-1", str((1 << 40) + 1)])
def test_a_memory_that_is_none_is_refused_by_name(memory: str, tmp_path: Path) -> None:
    environ = {
        "MAINSTAY_API_URL": "http://api", "MAINSTAY_JOB": "j", "MAINSTAY_POD": "p",
        "MAINSTAY_ADDRESS": HOST, "MAINSTAY_POD_DIR": str(tmp_path),
        "MAINSTAY_SNAPSHOT_MEMORY": memory,
    }  # fmt: skip
    with pytest.raises(InvalidSpecError, match=r"--snapshot-memory: .* from 0 to"):
        supervisor_settings.parse([], environ)


def test_the_stores_of_a_pod_need_no_torch() -> None:
    code = "import sys, mainstay_agent.supervisor; sys.exit('torch' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0
