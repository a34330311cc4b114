"""Puts the CRD of TrainingJobs on a control plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.cluster.control_plane import ControlPlane

CRD = Path(__file__).parents[2] / "manifests" / "crd.yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def apply_crd(plane: ControlPlane) -> None:
    """Apply it, and wait until the API server serves it.

    Raises:
        AssertionError: its schema is not structural.
    """
    body = yaml.load(CRD.read_text(), yaml.CSafeLoader)  # libyaml: a tenth of the time
    plane.api.apply(body)
    plane.api.wait(f"{CRDS}/{body['metadata']['name']}", _is_established, "established")


def _is_established(crd: dict[str, Any] | None) -> bool:
    conditions = ((crd or {}).get("status") or {}).get("conditions") or ()
    assert not [c for c in conditions if c["type"] == "NonStructuralSchema"]
    return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)
