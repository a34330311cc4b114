"""Two operators and one Lease on a real control plane: one acts, the other takes over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
from tests.worlds.served_namespace import OperatorProcess, manifest, serve_namespace, wait

# Short, and long enough for a machine that has other things to do.
TIMING = {
    "MAINSTAY_LEASE_DURATION_S": "6",
    "MAINSTAY_LEASE_RENEW_S": "4",
    "MAINSTAY_LEASE_RETRY_S": "0.3",
}


def leads(operator: OperatorProcess) -> bool | None:
    """Whether it says that it leads; None while it does not answer."""
    try:
        answer = httpx.get(f"{operator.url}/healthz", trust_env=False, timeout=5)
    except httpx.TransportError:
        return None
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["operator"]["leads"])


def names(job: str) -> list[str]:
    return [f"{job}-{i}" for i in range(5)]


def test_one_operator_acts_and_another_takes_over(control_plane: Any, tmp_path: Path) -> None:
    space = control_plane.make_namespace()
    path = f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases/operator"
    environment = {**TIMING, "MAINSTAY_LEASE": f"{space}/operator"}
    with serve_namespace(control_plane, tmp_path, **environment) as served:
        first = served.operator
        (tmp_path / "second").mkdir()
        second = OperatorProcess(
            control_plane,
            tmp_path / "second",
            MAINSTAY_API_URL=served.api.url,
            MAINSTAY_NAMESPACES=served.namespace,
            **environment,
        )

        def lease() -> dict[str, Any]:
            return dict(control_plane.api.get(path)["spec"])

        try:
            wait(lambda: leads(first), "the first leads")
            second.start()
            wait(lambda: leads(second) is False, "the second waits")
            job = served.submit(manifest("one"))
            job.wait_pods(*names("one"))
            assert lease()["leaseTransitions"] == 0
            for name in ("mainstay_operator_leader", "mainstay_operator_jobs"):
                assert second.metric(name) == 0

            first.kill()
            wait(lambda: leads(second), "the second takes over")
            assert lease()["leaseTransitions"] == 1
            served.kube.delete(served.path("pods", "one-0"), gracePeriodSeconds="0")
            served.submit(manifest("two")).wait_pods(*names("two"))
            wait(lambda: len(job.pods()) == 5, "the pool's refill")

            # One that ends in good order gives the Lease back: nobody waits for its term.
            first.start()
            wait(lambda: leads(first) is False, "the first waits")
            second.stop()
            wait(lambda: leads(first), "the first leads again")
            assert "nobody else has the Lease" in first.log()
            assert lease()["leaseTransitions"] == 2

            # One that stood still for too long ends, whatever it was about to do.
            second.start()
            wait(lambda: leads(second) is False, "the second waits again")
            os.kill(first.pid, signal.SIGSTOP)
            wait(lambda: leads(second), "the second takes over again")
            os.kill(first.pid, signal.SIGCONT)
            assert first.wait_end() == 1
            assert "decision=Stop" in first.log()
            assert leads(second)
        finally:
            second.stop()
            print(second.log()[-20_000:])  # noqa: T201 - shown if the test fails
