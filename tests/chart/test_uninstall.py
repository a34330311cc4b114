"""Whoever takes a release away is warned of the jobs that are not over; nobody is kept from it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.chart.charts import CHART
from tests.cluster.control_plane import ControlPlane
from tests.worlds.installed_chart import InstalledChart

GIVE_UP_S = 60.0
POLL_S = 0.2


@pytest.fixture
def world(control_plane: ControlPlane, tmp_path: Path) -> InstalledChart:
    """The CRD of jobs, and the rights of a release that serves all namespaces."""
    return InstalledChart(control_plane, tmp_path)


def test_an_uninstall_names_the_jobs_that_are_not_over(
    control_plane: ControlPlane, world: InstalledChart
) -> None:
    system, jobs, others = (control_plane.make_namespace() for _ in range(3))
    options = ["--set", f"crds.enabled=false,watchNamespaces={{{system},{jobs}}}", "-n", system]
    control_plane.helm("install", "leaving", str(CHART), *options)
    for namespace, name in ((jobs, "runs"), (jobs, "done"), (others, "unseen")):
        world.make_job(namespace, name)
    path = f"/apis/mainstay.dev/v1alpha1/namespaces/{jobs}/trainingjobs"
    control_plane.api.patch(f"{path}/done/status", {"status": {"state": "Complete"}})

    def warnings(component: str) -> list[str]:
        """What the API server would tell who deletes a Deployment."""
        path = f"/apis/apps/v1/namespaces/{system}/deployments/leaving-mainstay-{component}"
        reply = control_plane.api.http.delete(path, params={"dryRun": "All"})
        assert reply.is_success
        return reply.headers.get_list("Warning")

    deadline = time.monotonic() + GIVE_UP_S
    # The API server takes a policy up some moments after it is made.
    while not (told := warnings("operator")) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    (warning,) = told
    assert f"TrainingJob {jobs}/runs is not over" in warning
    # Another Deployment is nobody's business.
    assert not warnings("api")

    said = control_plane.helm("uninstall", "leaving", "-n", system, check=False)
    assert f"TrainingJob {jobs}/runs is not over" in said
    assert "uninstalled" in said
    assert "done" not in said
    assert "unseen" not in said
    for kind in ("validatingadmissionpolicy", "validatingadmissionpolicybinding"):
        assert system not in control_plane.kubectl("get", kind, "-o", "name")
