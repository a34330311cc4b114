"""The control plane is a real one."""

from __future__ import annotations

import pytest
from tests.cluster.client import ApiError
from tests.cluster.control_plane import ControlPlane


def test_a_new_namespace_gets_its_default_service_account(control_plane: ControlPlane) -> None:
    if not control_plane.has_controllers:
        pytest.skip("KUBEBUILDER_ASSETS holds no kube-controller-manager")
    namespace = control_plane.make_namespace()
    accounts = control_plane.api.list(f"/api/v1/namespaces/{namespace}/serviceaccounts")
    assert [account["metadata"]["name"] for account in accounts] == ["default"]


def test_a_user_without_a_role_is_refused(control_plane: ControlPlane) -> None:
    with pytest.raises(ApiError, match='User "alice" cannot list resource "pods"') as refused:
        control_plane.api_as("alice").list("/api/v1/namespaces/default/pods")
    assert refused.value.status == 403
    with pytest.raises(ApiError, match="Unauthorized"):
        control_plane.api_as("nobody", token="foreign").list("/api/v1/namespaces/default/pods")


def test_the_server_tells_its_version_to_kubectl(control_plane: ControlPlane) -> None:
    assert '"gitVersion": "v1.' in control_plane.kubectl("version", "-o", "json")
