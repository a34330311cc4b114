"""Whoever may edit jobs may scale them, and the scale names the job's pods."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.worlds.installed_chart import SPEC, InstalledChart


def kubectl_as(plane: ControlPlane, user: str, *args: str) -> subprocess.CompletedProcess[str]:
    kubeconfig = plane.kubeconfig_as(user)
    return subprocess.run(
        [str(plane.tools / "kubectl"), *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(plane.dir)},
    )


@pytest.mark.parametrize(("role", "may"), [("edit", True), ("view", False)])
def test_kubectl_scale_needs_the_role_edit(
    control_plane: ControlPlane, tmp_path: Path, role: str, may: bool
) -> None:
    world = InstalledChart(control_plane, tmp_path)
    namespace = control_plane.make_namespace()
    world.grant(namespace, role, "alice")
    spec: dict[str, Any] = {**SPEC, "parallelism": {**SPEC["parallelism"], "replicas": 2}}
    world.make_job(namespace, "demo", spec)
    path = f"/apis/mainstay.dev/v1alpha1/namespaces/{namespace}/trainingjobs/demo"
    selector = "mainstay.dev/job-uid=something"
    control_plane.api.patch(f"{path}/status", {"status": {"selector": selector}})
    done = kubectl_as(
        control_plane, "alice", "-n", namespace, "scale", "mtj", "demo", "--replicas=1"
    )
    assert (done.returncode == 0) == may, done.stderr
    read = kubectl_as(control_plane, "alice", "get", "--raw", f"{path}/scale")
    scale = json.loads(read.stdout)
    assert scale["status"]["selector"] == selector
    assert scale["spec"]["replicas"] == (1 if may else 2)
