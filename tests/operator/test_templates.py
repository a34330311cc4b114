"""Templates that the cluster judges: fields that nobody knows, quotas, accounts of their own."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cluster.client import ApiError
from tests.cluster.control_plane import ControlPlane
from tests.operator.test_builders import CONTAINER, OPTIONS, view
from tests.worlds.served_namespace import ServedNamespace, condition_of, manifest, wait

from mainstay_operator.builders import build_pod

SMALL: dict[str, Any] = {
    "training": {"steps": 60, "seed": 1, "lanes": 1},
    "parallelism": {},
    "spares": {"replicas": 0},
}
NAMESPACE = "kubernetes.io/metadata.name"
LIMITS = {"cpu": "1", "memory": "1Gi"}


def test_a_field_that_no_pod_has_is_told_before_any_pod_is_made(served: ServedNamespace) -> None:
    wrong = {"spec": {"containers": [{**CONTAINER, "imagePullPolice": "Always"}]}}
    job = served.submit(manifest("wrong", **SMALL, template=wrong))

    failed = condition_of(
        job.wait_status(lambda s: condition_of(s, "Failed").get("status") == "True", "a failure"),
        "Failed",
    )
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"].startswith("no pod can be made of spec.template and ")
    assert 'unknown field "spec.containers[0].imagePullPolice"' in failed["message"]
    (told,) = served.events("InvalidSpec")
    assert (told["message"], told["type"]) == (failed["message"], "Warning")
    assert job.names() == []
    assert served.api.client.get(f"/v1/jobs/{job.uid}").status_code == 404

    # Another change does not make it better; a better template does, and the job begins.
    job.patch(supervisor={"resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "2"}}})
    job.patch(suspend=True)
    job.patch(template={"spec": {"containers": [CONTAINER]}})
    assert job.names() == []
    job.patch(suspend=False)
    job.wait_pods("wrong-0")
    job.wait_condition("Failed", "False")


def test_what_a_policy_forbids_now_holds_pods_back_and_fails_no_job(
    served: ServedNamespace,
) -> None:
    policies, name = "/apis/admissionregistration.k8s.io/v1", f"no-{served.namespace}"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["CREATE"],
        "resources": ["pods"],
    }
    denied = "has(object.metadata.labels) && 'denied' in object.metadata.labels"
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": f"!({denied})", "message": "nobody may be denied"}],
    }
    here = {"namespaceSelector": {"matchLabels": {NAMESPACE: served.namespace}}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    for kind, spec in (("policies", policy), ("policybindings", binding)):
        body = {"metadata": {"name": name}, "spec": spec}
        served.kube.create(f"{policies}/validatingadmission{kind}", body)
    labelled = {"labels": {"denied": "yes"}}
    trial = {"metadata": {"name": "trial", **labelled}, "spec": {"containers": [CONTAINER]}}

    def is_denied() -> bool:
        try:
            served.kube.create(served.path("pods"), trial, dryRun="All")
        except ApiError as error:
            return error.status == 422
        return False

    wait(is_denied, "the policy")
    template = {"metadata": labelled, "spec": {"containers": [CONTAINER]}}
    job = served.submit(manifest("denied", **SMALL, template=template))
    held = job.wait_condition("Degraded", "True", "PodsRefused")
    assert "nobody may be denied" in held["message"]
    assert condition_of(job.get()["status"], "Failed")["status"] == "False"

    served.kube.delete(f"{policies}/validatingadmissionpolicybindings/{name}")
    job.wait_pods("denied-0")


def test_an_account_of_the_template_s_is_the_pods_own(served: ServedNamespace) -> None:
    served.kube.create(served.path("serviceaccounts"), {"metadata": {"name": "cloud"}})
    template = {"spec": {"serviceAccountName": "cloud", "containers": [CONTAINER]}}
    job = served.submit(manifest("identity", **SMALL, template=template))

    (pod,) = job.wait_pods("identity-0")
    assert pod["spec"]["serviceAccountName"] == "cloud"


def test_a_quota_on_limits_is_met_by_a_job_that_has_them(control_plane: ControlPlane) -> None:
    namespace = control_plane.make_namespace()
    api, core = control_plane.api, f"/api/v1/namespaces/{namespace}"
    hard = {"limits.cpu": "8", "limits.memory": "8Gi"}
    api.create(f"{core}/resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": hard}})
    api.create(f"{core}/serviceaccounts", {"metadata": {"name": OPTIONS.names.shared}})
    quota = f"{core}/resourcequotas/q"
    api.wait(quota, lambda q: (q or {}).get("status", {}).get("hard"))
    trainer = {"spec": {"containers": [{**CONTAINER, "resources": {"limits": LIMITS}}]}}

    def make(**spec: Any) -> None:
        pod = build_pod(view(template=trainer, **spec), 0, OPTIONS)
        pod["metadata"] |= {"namespace": namespace, "ownerReferences": []}
        api.create(f"{core}/pods", pod)

    with pytest.raises(ApiError, match="must specify limits"):
        make()
    make(supervisor={"resources": {"limits": LIMITS}})
    used = wait(lambda: api.get(quota)["status"].get("used"), "the quota's count")
    assert set(used) == set(hard)
