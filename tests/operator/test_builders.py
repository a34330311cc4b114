"""The objects of a job: what the operator needs wins, the rest of the template is kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.worlds.served_namespace import manifest

from mainstay_core.job.pod_templates import OWN_VARIABLES, OWN_VOLUMES
from mainstay_operator.builders import (
    PodOptions,
    build_disruption_budget,
    build_network_policy,
    build_pod,
    build_service,
)
from mainstay_operator.resources import JobView, ObjectNames, view_job

NAMES = ObjectNames(shared="mtj-demo-u-1", secret="mtj-demo-u-1")
OPTIONS = PodOptions(agent_image="ours:1", pull_policy="Never", api_url="http://api", names=NAMES)
CONTAINER = {"name": "trainer", "image": "torch:test"}
SNAPSHOTS = {"enabled": True, "memory": "1Gi", "peers": 0}


def view(**spec: Any) -> JobView:
    body = manifest(**spec)
    body["metadata"] |= {"uid": "u-1", "namespace": "train", "resourceVersion": "7"}
    made = view_job(body)
    assert not made.invalid
    return made


def test_a_window_that_an_earlier_release_took_is_refused_only_where_a_job_begins() -> None:
    model = {"dim": 16, "layers": 6, "heads": 4, "kvHeads": 2, "hidden": 32}
    workload = {"entrypoint": "mainstay_train.models.llama:workload", "config": model}
    long = manifest(snapshots={"enabled": True, "window": 1000}, workload=workload)
    long["metadata"] |= {"uid": "u-1", "namespace": "train"}

    new = view_job(long | {"status": {"pods": {"made": 0}}})
    assert new.job is None
    assert new.invalid.startswith("spec.snapshots.window: is 1000, but no stage has more than ")
    signs = {"startTime": "2026-11-26T09:00:00Z"}, {"quorum": {"id": 7}}, {"pods": {"made": 3}}
    for begun in signs:
        runs = view_job(long | {"status": begun})
        assert not runs.invalid
        assert runs.job is not None, "its pods are made again as ever"


def pod(template: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    if template is not None:
        spec["template"] = template
    return build_pod(view(**spec), 3, OPTIONS)


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({i["name"] for i in items}) == len(items)
    return {i["name"]: i for i in items}


def test_the_same_job_makes_the_same_pod() -> None:
    assert pod() == pod()


def test_a_pod_is_a_supervisor_beside_the_user_s_trainer() -> None:
    spec = pod()["spec"]
    init = by_name(spec["initContainers"])

    assert list(init) == ["install", "supervisor"]
    assert init["supervisor"]["restartPolicy"] == "Always"
    assert init["supervisor"]["image"] == "ours:1"
    (trainer,) = spec["containers"]
    assert trainer["image"] == "torch:test"
    assert trainer["command"] == ["python", "-m", "mainstay_train.launcher"]
    assert by_name(trainer["env"])["PYTHONPATH"]["value"] == "/opt/mainstay"
    assert spec["restartPolicy"] == "OnFailure"


def test_pods_have_no_rights_and_a_token_for_this_job_alone() -> None:
    spec = pod()["spec"]
    (token, secret) = by_name(spec["volumes"])["mainstay-token"]["projected"]["sources"]

    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == NAMES.shared
    assert token["serviceAccountToken"]["audience"] == "mainstay.dev/jobs/u-1"
    assert secret["secret"]["name"] == NAMES.secret


def test_the_key_of_checkpoints_is_mounted_where_the_job_names_one() -> None:
    spec = pod(checkpoint={"keySecret": "keys"})["spec"]
    *_, key = by_name(spec["volumes"])["mainstay-token"]["projected"]["sources"]
    (trainer,) = spec["containers"]
    mounts = {m["name"]: m["mountPath"] for m in trainer["volumeMounts"]}

    assert key["secret"]["name"] == "keys"
    (item,) = key["secret"]["items"]
    assert item["key"] == "key"
    path = by_name(trainer["env"])["MAINSTAY_CHECKPOINT_KEY_FILE"]["value"]
    assert path == f"{mounts['mainstay-token']}/{item['path']}"
    (without,) = pod()["spec"]["containers"]
    assert "MAINSTAY_CHECKPOINT_KEY_FILE" not in by_name(without["env"])


def test_supervisors_are_told_how_much_memory_their_segments_have() -> None:
    without = by_name(pod()["spec"]["initContainers"][1]["env"])
    made = pod(snapshots=SNAPSHOTS, protection={"domains": 1})
    env = by_name(made["spec"]["initContainers"][1]["env"])

    assert "MAINSTAY_SNAPSHOT_MEMORY" not in without
    assert env["MAINSTAY_SNAPSHOT_MEMORY"]["value"] == str(1 << 30)


def test_a_pod_is_within_the_restricted_profile_unless_the_template_says_otherwise() -> None:
    spec = pod()["spec"]

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False

    rdma = {
        "spec": {
            "hostNetwork": True,
            "securityContext": {"runAsUser": 0},
            "containers": [
                {
                    "name": "trainer",
                    "image": "x",
                    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                }
            ],
        }
    }
    spec = pod(rdma)["spec"]
    assert spec["hostNetwork"] is True
    assert spec["securityContext"] == {"runAsUser": 0, "fsGroup": 65532}
    assert spec["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_what_the_template_gives_is_kept() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "terminationGracePeriodSeconds": 500,
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "initContainers": [{"name": "warm", "image": "warm"}],
            "containers": [
                {"name": "log", "image": "log"},
                {
                    "name": "trainer",
                    "image": "torch",
                    "command": ["/venv/bin/python", "-m", "mainstay_train.launcher"],
                    "env": [
                        {"name": "PYTHONPATH", "value": "/code"},
                    ],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    "resources": {"limits": {"nvidia.com/gpu": "8"}},
                },
            ],
        },
    }
    made = pod(template)
    spec = made["spec"]
    containers = by_name(spec["containers"])
    env = by_name(containers["trainer"]["env"])

    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["labels"]["mainstay.dev/job-uid"] == "u-1"
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["terminationGracePeriodSeconds"] == 500
    assert list(by_name(spec["initContainers"])) == ["install", "supervisor", "warm"]
    assert "command" not in containers["log"]
    assert containers["trainer"]["command"][0] == "/venv/bin/python"
    assert env["PYTHONPATH"]["value"] == "/opt/mainstay:/code"
    assert env["MAINSTAY_JOB"]["value"] == "u-1"
    assert {m["mountPath"] for m in containers["trainer"]["volumeMounts"]} >= {"/data", "/dev/shm"}
    assert "data" in by_name(spec["volumes"])


def test_what_the_operator_sets_no_template_can_name() -> None:
    """What a template names is refused or kept, never replaced in silence."""
    every = {"snapshots": SNAPSHOTS, "protection": {"domains": 1}}
    spec = pod(checkpoint={"keySecret": "keys"}, **every)["spec"]
    supervisor = by_name(spec["initContainers"])["supervisor"]

    assert {v["name"] for v in supervisor["env"]} == OWN_VARIABLES
    assert all(v["name"].startswith(OWN_VOLUMES) for v in spec["volumes"])


def test_variables_keep_their_order_and_may_use_ours() -> None:
    user = [
        {"name": "PYTHONPATH", "value": "/code"},
        {"name": "TOOLS", "value": "$(PYTHONPATH):$(MAINSTAY_POD_NAME)"},
    ]
    made = pod({"spec": {"containers": [{**CONTAINER, "env": user, "command": None}]}})
    (trainer,) = made["spec"]["containers"]
    names = [variable["name"] for variable in trainer["env"]]

    assert names[-2:] == ["PYTHONPATH", "TOOLS"]
    assert set(names[:-2]) <= OWN_VARIABLES
    assert trainer["command"] == ["python", "-m", "mainstay_train.launcher"]


def test_a_job_s_next_pod_has_the_account_of_those_that_it_has() -> None:
    options = dataclasses.replace(OPTIONS, account="before")
    template = {"spec": {"serviceAccountName": "now", "containers": [CONTAINER]}}

    assert build_pod(view(template=template), 0, options)["spec"]["serviceAccountName"] == "before"


def test_parts_of_a_pod_that_are_null_are_as_left_out() -> None:
    affinity = {"podAffinity": None, "nodeAffinity": {"required": None}}
    template = {"spec": {"affinity": affinity, "containers": [CONTAINER]}}
    options = dataclasses.replace(OPTIONS, avoid_nodes=("n1",), shun_nodes=("n2",))
    job = view(template=template, scheduling={"replicaTopologyKey": "r", "spreadTopologyKey": "z"})

    made = build_pod(job, 0, options)["spec"]["affinity"]
    assert all(made[kind] for kind in ("podAffinity", "nodeAffinity"))


def test_the_account_and_the_tokens_that_a_template_names_are_kept() -> None:
    named = {"serviceAccountName": "trainer", "automountServiceAccountToken": True}
    spec = pod({"spec": {**named, "containers": [CONTAINER]}})["spec"]

    assert {name: spec[name] for name in named} == named


def test_our_containers_have_the_resources_of_the_setting_or_the_job() -> None:
    setting = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    options = dataclasses.replace(OPTIONS, resources=setting)

    for container in build_pod(view(), 0, options)["spec"]["initContainers"]:
        assert container["resources"] == setting
    own = {"resources": {"limits": {"cpu": 2, "memory": "3Gi"}}}
    for container in build_pod(view(supervisor=own), 0, options)["spec"]["initContainers"]:
        assert container["resources"] == {"limits": {"cpu": "2", "memory": "3Gi"}}


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, {"requests": {"memory": str(1 << 30)}}),
        (
            {"requests": {"cpu": "100m", "memory": "128Mi"}},
            {"requests": {"cpu": "100m", "memory": str((1 << 30) + (128 << 20))}},
        ),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": str(2 << 30)}}),
        (
            {"requests": {"memory": "1Gi"}, "limits": {"cpu": "1", "memory": "3Gi"}},
            {"requests": {"memory": str(2 << 30)}, "limits": {"cpu": "1", "memory": str(4 << 30)}},
        ),
    ],
)
def test_the_supervisor_has_the_memory_of_snapshots_beside_its_own(
    resources: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = dataclasses.replace(OPTIONS, resources=resources)
    job = view(snapshots=SNAPSHOTS, protection={"domains": 1})
    install, supervisor = build_pod(job, 0, options)["spec"]["initContainers"]
    assert install["resources"] == resources
    assert supervisor["resources"] == expected


def test_shared_memory_is_bounded_by_the_model_where_it_is_known() -> None:
    built_in = {"entrypoint": "mainstay_train.models.llama:workload", "config": {}}
    made = pod(workload=built_in, runtime={"device": "CPU"})
    shm = by_name(made["spec"]["volumes"])["mainstay-shm"]["emptyDir"]
    reason = made["metadata"]["annotations"]["mainstay.dev/shared-memory"]
    assert shm == {"medium": "Memory", "sizeLimit": "83Mi"}
    assert reason.startswith("64 MiB and, for each of 1 slots, 19 MiB")
    larger = pod(workload=built_in)["spec"]["volumes"]
    assert by_name(larger)["mainstay-shm"]["emptyDir"]["sizeLimit"] == "1107Mi"

    unknown = pod()
    assert by_name(unknown["spec"]["volumes"])["mainstay-shm"]["emptyDir"] == {"medium": "Memory"}
    reason = unknown["metadata"]["annotations"]["mainstay.dev/shared-memory"]
    assert "package.module:workload" in reason


def test_the_template_s_own_shared_memory_is_that_of_both_containers() -> None:
    own = {"name": "mine", "mountPath": "/dev/shm/"}
    template = {
        "spec": {
            "containers": [
                {"name": "log", "image": "log:1"},
                {"name": "trainer", "image": "torch:1", "volumeMounts": [own]},
            ],
            "volumes": [{"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "9Gi"}}],
        }
    }
    made = pod(template)
    spec = made["spec"]
    volumes = by_name(spec["volumes"])
    assert volumes["mine"]["emptyDir"]["sizeLimit"] == "9Gi"
    assert "mainstay-shm" not in volumes
    for container in (by_name(spec["containers"])["trainer"], spec["initContainers"][1]):
        at_shm = [m for m in container["volumeMounts"] if m["mountPath"].startswith("/dev/shm")]
        assert at_shm == [own]
    assert made["metadata"]["annotations"]["mainstay.dev/shared-memory"] == (
        "the template's own volume"
    )


def test_a_pod_outlasts_its_hand_over() -> None:
    assert pod(recovery={"handoverSeconds": 120})["spec"]["terminationGracePeriodSeconds"] == 150


def test_topology_keys_place_pods() -> None:
    spec = pod(scheduling={"replicaTopologyKey": "rack", "spreadTopologyKey": "zone"})["spec"]

    (near,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (apart,) = spec["topologySpreadConstraints"]
    assert near["podAffinityTerm"]["topologyKey"] == "rack"
    assert (apart["topologyKey"], apart["whenUnsatisfiable"]) == ("zone", "ScheduleAnyway")


def test_avoided_nodes_are_kept_off_beside_what_the_template_requires() -> None:
    options = dataclasses.replace(OPTIONS, avoid_nodes=("n2", "n1"))
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}]
    node = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = {"spec": {"affinity": {"nodeAffinity": node}, "containers": [CONTAINER]}}

    spec = build_pod(view(template=template), 0, options)["spec"]

    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}
    assert [t["matchExpressions"][-1] for t in affinity["nodeSelectorTerms"]] == [avoid, avoid]


def test_the_service_names_pods_before_they_are_ready() -> None:
    spec = build_service(view(), NAMES)["spec"]

    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)


def test_the_budget_is_an_integer() -> None:
    assert build_disruption_budget(view(), NAMES, 4)["spec"]["minAvailable"] == 4


def test_the_network_policy_lets_the_job_its_api_and_dns_through() -> None:
    spec = build_network_policy(view(), NAMES, {"app": "api"})["spec"]

    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert len(spec["ingress"]) == 1
    assert {"protocol": "UDP", "port": 53} in spec["egress"][2]["ports"]
    (api,) = spec["egress"][1]["to"]
    assert api == {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "api"}}}
    (api,) = build_network_policy(view(), NAMES, {}, "system")["spec"]["egress"][1]["to"]
    here = {"kubernetes.io/metadata.name": "system"}
    assert api["namespaceSelector"] == {"matchLabels": here}
