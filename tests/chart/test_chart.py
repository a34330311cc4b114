"""The chart as Helm renders it, judged by a real API server: valid objects, least rights."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.chart.charts import (
    CHART,
    MATRIX,
    MONITORING,
    ROOT,
    WORKLOADS,
    container_of,
    environment_of,
    find,
    render,
)
from tests.cluster.control_plane import ControlPlane

from mainstay_api.settings import CLUSTER
from mainstay_api.settings import Settings as ApiSettings

Matrix = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def restricted(control_plane: ControlPlane) -> str:
    """A namespace that lets in restricted pods alone."""
    return control_plane.make_namespace(
        **{"pod-security.kubernetes.io/enforce": "restricted"}  # type: ignore[arg-type]
    )


def dry_run(plane: ControlPlane, objects: list[dict[str, Any]]) -> None:
    for o in objects:
        plane.api.apply(o, dryRun="All", fieldValidation="Strict")


@pytest.fixture(scope="module")
def matrix(control_plane: ControlPlane, restricted: str) -> Matrix:
    """The objects of one row of the matrix, rendered once."""

    @functools.cache
    def of(name: str) -> list[dict[str, Any]]:
        return render(control_plane, restricted, *MATRIX[name])

    return of


def test_helm_finds_nothing_to_complain_of(control_plane: ControlPlane) -> None:
    control_plane.helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_what_is_rendered_is_valid(
    control_plane: ControlPlane, restricted: str, matrix: Matrix, name: str
) -> None:
    objects = matrix(name)
    dry_run(control_plane, objects)
    for workload in (o for o in objects if o["kind"] in WORKLOADS):
        template = workload["spec"]["template"]
        # What is refused in a workload's pods is refused to its controller only, later.
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], "name": "p", "namespace": restricted},
            "spec": {
                **template["spec"],
                "serviceAccountName": "default",
                "priorityClassName": "",
            },
        }
        claims = workload["spec"].get("volumeClaimTemplates", ())
        pod["spec"]["volumes"] = [
            *template["spec"].get("volumes", ()),
            *({"name": c["metadata"]["name"], "emptyDir": {}} for c in claims),
        ]
        dry_run(control_plane, [pod])


REFUSED = {
    "a misspelt name": ("api.replica=2", "replica"),
    "a misspelt section": ("rediss.enabled=true", "rediss"),
    "no api": ("api.replicas=0", "api/replicas"),
    "a number as a text": ("api.replicas=two", "api/replicas"),
    "a port that is none": ("api.service.port=70000", "port"),
    "a digest that is none": ("api.image.digest=latest", "digest"),
    "a policy that is none": ("image.pullPolicy=Sometimes", "pullPolicy"),
    "a namespace that is none": ("watchNamespaces={Team_A}", "watchNamespaces"),
    "a namespace twice": ("watchNamespaces={a,a}", "watchNamespaces"),
    "redis nowhere": ("redis.internal.enabled=false", "host"),
    "redis as root": ("redis.internal.runAsUser=0", "runAsUser"),
    "a size that is none": ("redis.internal.persistence.size=big", "size"),
    "no operator": ("operator.replicas=0", "replicas"),
    "an interval that is none": ("metrics.podMonitor.interval=often", "interval"),
    "sentinels nowhere": (
        "redis.internal.enabled=false,redis.external.sentinel.master=store",
        "sentinel/hosts",
    ),
    "an address that is none": ("networkPolicy.kubeApi.cidrs={kubernetes}", "cidrs"),
    "a probe of another kind": ("api.livenessProbe.httpGet.path=/", "httpGet"),
    "a limit that lets nobody in": ("api.limits.podRequestsPerSecond=0", "podRequestsPerSecond"),
    "metrics for anybody": ("metrics.access=open", "access"),
    "answers used for ever": ("api.reviewCacheSeconds=100000", "reviewCacheSeconds"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_values_that_cannot_be_meant_are_refused_by_name(
    control_plane: ControlPlane, name: str
) -> None:
    value, words = REFUSED[name]
    command = ["template", "mainstay", str(CHART), "--set", value]
    said = control_plane.helm(*command, check=False)
    assert "values don't meet the specifications of the schema" in said
    assert words in said


def test_every_value_is_in_the_schema_and_described() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        known = schema.get("properties")
        if known is None:
            return
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(known) - {"global"}, path
        for key, value in values.items():
            if isinstance(value, dict):
                compare(known[key], value, f"{path}.{key}")

    # The registry of an image is the chart's unless the component names one.
    for component in ("operator", "api", "agent"):
        values[component]["image"] |= {"registry": "", "pullPolicy": ""}
    compare(schema, values, "values")


def test_monitors_and_rules_are_left_out_where_nobody_would_read_them(
    control_plane: ControlPlane,
) -> None:
    values = MATRIX["metrics"]
    kinds = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    without = render(control_plane, "default", *values)
    assert not kinds & {o["kind"] for o in without}
    having = render(control_plane, "default", *values, options=("--api-versions", MONITORING))
    found = {(o["kind"], o["metadata"]["name"]): o for o in having if o["kind"] in kinds}
    for kind, component, port in (
        ("ServiceMonitor", "api", "http"),
        ("PodMonitor", "api", "http"),
        ("PodMonitor", "operator", "probes"),
    ):
        spec = found.pop((kind, f"mainstay-{component}"))["spec"]
        workload = find(having, "Deployment", f"mainstay-{component}")
        assert spec["selector"]["matchLabels"].items() <= container_labels(workload).items()
        (endpoint,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["path"]) == (port, "/metrics")
        assert port in {p["name"] for p in container_of(workload)["ports"]}
        shown = {"credentials": {"name": "scraper", "key": "token"}}
        assert endpoint.get("authorization") == (shown if component == "api" else None)
    (((kind, _), rule),) = found.items()
    assert kind == "PrometheusRule"
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_metrics_have_a_token_or_a_port_that_no_pod_of_a_job_may_reach(
    control_plane: ControlPlane,
) -> None:
    there = ("--api-versions", MONITORING)
    monitor = "metrics.serviceMonitor.enabled=true"
    found = render(control_plane, "default", monitor, options=there)
    (endpoint,) = find(found, "ServiceMonitor", "mainstay-api")["spec"]["endpoints"]
    assert endpoint["bearerTokenFile"].startswith("/var/run/secrets/")
    role = find(found, "ClusterRole", "default:mainstay:metrics-reader")
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    refused = control_plane.helm(
        *["template", "mainstay", str(CHART), *there, "--set", "metrics.podMonitor.enabled=true"],
        check=False,
    )
    assert "metrics.podMonitor needs metrics.tokenSecret.name" in refused

    own = MATRIX["metrics on a port of their own"]
    found = render(control_plane, "default", *own, options=there)
    assert not [o for o in found if o["kind"] == "ServiceMonitor"], "no Service has that port"
    (endpoint,) = find(found, "PodMonitor", "mainstay-api")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], "authorization" in endpoint) == ("metrics", False)
    api = find(found, "Deployment", "mainstay-api")
    ports = {p["name"]: p["containerPort"] for p in container_of(api)["ports"]}
    assert (ports["metrics"], environment_of(api)["MAINSTAY_METRICS_PORT"]) == (9900, "9900")
    (service,) = (
        o for o in found if o["kind"] == "Service" and o["metadata"]["name"].endswith("-api")
    )
    assert [p["name"] for p in service["spec"]["ports"]] == ["http"]
    rules = find(found, "NetworkPolicy", "mainstay-api")["spec"]["ingress"]
    (scraped,) = (rule for rule in rules if {"port": "metrics"} in rule["ports"])
    assert scraped["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


def test_faults_are_injected_only_where_the_values_say_so(matrix: Matrix) -> None:
    for name, allowed in (("as it comes", "false"), ("limits", "true")):
        api = find(matrix(name), "Deployment", "mainstay-api")
        assert environment_of(api)["MAINSTAY_FAULT_INJECTION"] == allowed


def container_labels(workload: dict[str, Any]) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def test_a_budget_never_keeps_a_node_from_being_drained(control_plane: ControlPlane) -> None:
    for replicas, budgets in ((1, 0), (2, 1), (5, 1)):
        objects = render(
            control_plane, "default", f"api.replicas={replicas}", f"operator.replicas={replicas}"
        )
        assert sum(o["kind"] == "PodDisruptionBudget" for o in objects) == 2 * budgets


def test_two_operators_are_two_pods_at_any_time(control_plane: ControlPlane) -> None:
    """One of them takes over while the other one is replaced; a single one is never two."""
    for replicas, kind in ((1, "Recreate"), (2, "RollingUpdate")):
        objects = render(control_plane, "spaces", f"operator.replicas={replicas}")
        spec = find(objects, "Deployment", "mainstay-operator")["spec"]
        assert (spec["replicas"], spec["strategy"]["type"]) == (replicas, kind)
        assert ("topologySpreadConstraints" in spec["template"]["spec"]) == (replicas > 1)
        assert "spec" not in find(objects, "Lease", "mainstay-operator")


def test_all_our_images_are_named_by_the_values(control_plane: ControlPlane) -> None:
    objects = render(control_plane, "default", *MATRIX["images"])
    operator = find(objects, "Deployment", "mainstay-operator")
    api = find(objects, "Deployment", "mainstay-api")
    digest = "sha256:" + "0123456789abcdef" * 4
    team = "images.example.com/team"
    assert container_of(api)["image"] == f"{team}/mainstay-api@{digest}"
    assert container_of(operator)["image"] == f"{team}/mainstay-operator:v9"
    environment = environment_of(operator)
    assert environment["MAINSTAY_AGENT_IMAGE"] == "other.example.com/mainstay-agent:1.2.3"
    assert environment["MAINSTAY_AGENT_PULL_POLICY"] == "Always"
    spec = api["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_the_api_can_read_the_settings_that_the_chart_gives(
    restricted: str, matrix: Matrix, name: str
) -> None:
    objects = matrix(name)
    apis = [
        o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"].endswith("-api")
    ]
    environment = {
        key: value if isinstance(value, str) else "from a secret"
        for key, value in environment_of(apis[0]).items()
    }
    # What the kubelet adds.
    settings = ApiSettings.from_environment({**environment, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert settings.host == "0.0.0.0"
    account = "mine" if name == "own accounts" else "mainstay-operator"
    account = "something-else-operator" if name == "another name" else account
    assert settings.operator_user == f"system:serviceaccount:{restricted}:{account}"
    if name == "limits":
        assert (settings.pod_requests_per_s, settings.job_requests_per_s) == (3.0, 1e6)
        assert (settings.max_events, settings.fault_injection) == (1_000_000, True)
    if name == "as it comes":
        chosen = {field: getattr(settings, field) for field in CLUSTER}
        assert chosen == CLUSTER, "the chart's defaults are the api's"
    if name == "external redis":
        assert settings.redis_url == "rediss://mainstay@redis.example.com:6380/0"
        assert settings.redis_ca_file == "/etc/mainstay/redis/ca.crt"
        assert settings.redis_cert_file == "/etc/mainstay/redis/tls.crt"
        assert settings.redis_key_file == "/etc/mainstay/redis/tls.key"
    if name == "sentinels":
        told = "mainstay@one.example.com:26379,two.example.com:7/store/3"
        assert settings.redis_url == f"rediss+sentinel://{told}"
        assert (settings.redis_ca_file, settings.redis_cert_file) == ("", "")
        assert settings.redis_sentinel_password
    if name == "redis with tls":
        assert settings.redis_url == f"rediss://mainstay-redis.{restricted}.svc:6379/0"
        assert settings.redis_ca_file == "/etc/mainstay/redis/ca.crt"


def test_the_operator_can_read_the_settings_that_the_chart_gives(
    control_plane: ControlPlane,
) -> None:
    settings = pytest.importorskip("mainstay_operator.settings")
    objects = render(control_plane, "spaces", "watchNamespaces={a,b}")
    environment = environment_of(find(objects, "Deployment", "mainstay-operator"))
    known = {settings.variable_of(name) for name in settings.Settings.__dataclass_fields__}
    assert set(environment) <= known, "the operator would not read these"
    read = settings.parse([], environment)
    assert read.namespace_list == ("a", "b")
    assert (read.lease, read.lease_timing.duration_s) == ("spaces/mainstay-operator", 15.0)
    assert read.api_url == "http://mainstay-api.spaces.svc:8080"
    # The selector of the jobs' NetworkPolicies is that of the api's pods, and of nobody else's.
    policies = render(control_plane, "spaces")
    environment = environment_of(find(policies, "Deployment", "mainstay-operator"))
    read = settings.parse([], environment)
    assert read.network_policy
    chosen = dict(pair.split("=") for pair in read.api_selector.split(","))
    assert chosen.items() <= container_labels(find(policies, "Deployment", "mainstay-api")).items()
    assert (read.api_namespace, len(chosen)) == ("spaces", 3)
    everywhere = render(control_plane, "spaces", "rbac.cluster=true")
    environment = environment_of(find(everywhere, "Deployment", "mainstay-operator"))
    assert settings.parse([], environment).namespace_list == ()


def test_the_manifest_is_what_the_chart_renders(control_plane: ControlPlane, tmp_path: Any) -> None:
    helm = control_plane.tools / "helm"
    command = [sys.executable, str(ROOT / "scripts/manifests.py"), "--check"]
    environment = {"HELM": str(helm), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_holds_no_password_and_is_valid(control_plane: ControlPlane) -> None:
    objects = list(yaml.load_all((ROOT / "manifests/install.yaml").read_text(), yaml.CSafeLoader))
    assert not [o for o in objects if o["kind"] == "Secret"]
    if control_plane.api.find("/api/v1/namespaces/mainstay-system") is None:
        control_plane.make_namespace("mainstay-system")
    dry_run(control_plane, objects)


def test_a_release_goes_in_is_upgraded_with_its_password_and_leaves_nothing(
    control_plane: ControlPlane,
) -> None:
    namespace = control_plane.make_namespace()
    # The CRD is the whole cluster's, and other tests use it.
    options = ["--namespace", namespace, "--set", "crds.enabled=false,fullnameOverride=told"]
    before = what_is_there(control_plane, namespace)
    said = control_plane.helm("install", "told", str(CHART), *options)
    # The three next commands.
    assert said.count("\n  kubectl ") == 3
    assert f"serves TrainingJobs in {namespace}.\n" in said
    assert "A TrainingJob in any other namespace is seen by nobody" in said
    path = f"/api/v1/namespaces/{namespace}/secrets/told-redis"
    password = control_plane.api.get(path)["data"]["password"]
    assert len(password) > 40
    more = ["--set", "api.replicas=3,operator.quarantineNodes=true"]
    control_plane.helm("upgrade", "told", str(CHART), *options, *more)
    assert control_plane.api.get(path)["data"]["password"] == password
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    assert control_plane.api.get(f"{deployments}/told-api")["spec"]["replicas"] == 3
    control_plane.helm("uninstall", "told", "--namespace", namespace)
    control_plane.api.wait(f"{deployments}/told-api", lambda found: found is None)
    claim = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/told-redis"
    control_plane.api.wait(claim, lambda found: found is None)
    assert what_is_there(control_plane, namespace) == before


def what_is_there(plane: ControlPlane, namespace: str) -> set[str]:
    kinds = "deployments,statefulsets,services,secrets,serviceaccounts,roles,rolebindings,pdb"
    kinds += ",persistentvolumeclaims,networkpolicies"
    listed = plane.kubectl("get", kinds, "-n", namespace, "-o", "name").split()
    kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies"
    kinds += ",validatingadmissionpolicybindings"
    wide = plane.kubectl("get", kinds, "-o", "name").split()
    return {*listed, *(name for name in wide if namespace in name)}


RIGHTS = {
    # (account, verb, resource, where): by default, and with quarantine
    ("operator", "patch", "trainingjobs.mainstay.dev/status", "own"): True,
    ("operator", "create", "pods", "own"): True,
    ("operator", "delete", "pods", "own"): True,
    ("operator", "create", "pods", "other"): False,
    ("operator", "get", "secrets", "own"): True,
    ("operator", "list", "secrets", "own"): False,
    ("operator", "patch", "secrets", "own"): False,
    ("operator", "get", "secrets", "other"): False,
    ("operator", "create", "pods/exec", "own"): False,
    ("operator", "create", "roles.rbac.authorization.k8s.io", "own"): False,
    ("operator", "delete", "trainingjobs.mainstay.dev", "own"): True,
    ("operator", "delete", "trainingjobs.mainstay.dev", "other"): False,
    ("operator", "create", "trainingjobs.mainstay.dev", "own"): False,
    ("operator", "get", "leases.coordination.k8s.io", "system"): True,
    ("operator", "update", "leases.coordination.k8s.io", "system"): True,
    ("operator", "delete", "leases.coordination.k8s.io", "system"): False,
    ("operator", "update", "leases.coordination.k8s.io", "own"): False,
    ("operator", "get", "namespaces", "own"): True,
    ("operator", "get", "namespaces", "other"): False,
    ("operator", "list", "nodes", "cluster"): True,
    ("operator", "patch", "nodes", "cluster"): False,
    ("operator", "create", "tokenreviews.authentication.k8s.io", "cluster"): False,
    ("api", "create", "tokenreviews.authentication.k8s.io", "cluster"): True,
    ("api", "create", "subjectaccessreviews.authorization.k8s.io", "cluster"): True,
    ("api", "get", "trainingjobs.mainstay.dev", "own"): True,
    ("api", "get", "trainingjobs.mainstay.dev", "other"): False,
    ("api", "patch", "trainingjobs.mainstay.dev", "own"): False,
    ("api", "get", "secrets", "own"): False,
    ("api", "list", "pods", "own"): False,
    ("api", "list", "nodes", "cluster"): False,
}


def test_everybody_may_what_they_need_and_nothing_else(control_plane: ControlPlane) -> None:
    system, own, other = (control_plane.make_namespace() for _ in range(3))
    places = {"own": own, "other": other, "cluster": "", "system": system}
    names = {"namespaces": places, "leases": dict.fromkeys(places, "mainstay-operator")}

    def install(*more: str) -> None:
        objects = render(control_plane, system, f"watchNamespaces={{{own}}}", *more)
        for o in objects:
            if o["kind"] == "ServiceAccount" or o["kind"].startswith(("Role", "ClusterRole")):
                control_plane.api.apply(o, system)

    def may(account: str, verb: str, resource: str, where: str) -> bool:
        name, _, rest = resource.partition(".")
        group, _, below = rest.partition("/")
        name, _, part = name.partition("/")
        spec = {
            "user": f"system:serviceaccount:{system}:mainstay-{account}",
            "resourceAttributes": {
                "namespace": places[where],
                "verb": verb,
                "group": group,
                "resource": name,
                "subresource": below or part,
                "name": names[name][where] if name in names else "",
            },
        }
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(control_plane.api.create(path, {"spec": spec})["status"]["allowed"])

    install()
    found = {question: may(*question) for question in RIGHTS}
    assert found == RIGHTS
    install("operator.quarantineNodes=true", "rbac.cluster=true")
    for question, expected in RIGHTS.items():
        account, verb, resource, where = question
        if resource == "namespaces":
            continue  # who may list all jobs need not ask for a namespace
        widened = (where == "other" and verb in ("create", "get")) or resource == "nodes"
        if account == "operator" and widened and verb != "list":
            assert may(*question), question
        elif where != "other":
            assert may(*question) == expected, question


def test_everybody_reaches_the_api_and_no_other_service_through_the_api_server(
    control_plane: ControlPlane,
) -> None:
    system = control_plane.make_namespace()
    for o in render(control_plane, system):
        if o["kind"] in ("Role", "RoleBinding", "Service"):
            control_plane.api.apply(o, system)
    alice = control_plane.api_as("alice")
    path = f"/api/v1/namespaces/{system}/services"
    for name, status in (("http:mainstay-api:8080", 503), ("http:mainstay-redis:6379", 403)):
        for method in ("GET", "POST"):
            # 503: nobody runs the api here.
            reply = alice.http.request(method, f"{path}/{name}/proxy/v1/jobs")
            assert reply.status_code == status, (name, method, reply.text)
    assert alice.http.get(f"{path}/mainstay-api").status_code == 403


def test_the_page_of_values_is_what_values_say() -> None:
    command = [sys.executable, str(ROOT / "scripts/chart_readme.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_slow_start_is_waited_for_before_anything_is_started_again(matrix: Matrix) -> None:
    """On a node that does much else the imports alone take longer than liveness allows."""
    for workload in (o for o in matrix("as it comes") if o["kind"] in WORKLOADS):
        container = container_of(workload)
        start, live = container["startupProbe"], container["livenessProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 300
        ask = {"httpGet", "tcpSocket", "exec"}
        if workload["kind"] == "Deployment":
            assert {k: start[k] for k in ask & set(start)} == {k: live[k] for k in ask & set(live)}


def test_pods_take_what_the_values_add(matrix: Matrix) -> None:
    name = "pods of one's own kind"
    for workload in (o for o in matrix(name) if o["kind"] in WORKLOADS):
        spec, container = workload["spec"]["template"]["spec"], container_of(workload)
        assert spec["securityContext"]["supplementalGroups"] == [7]
        # What is added takes nothing away.
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] in (65532, 999)
        assert container["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["livenessProbe"]["timeoutSeconds"] == 11
        assert {"httpGet", "tcpSocket"} & set(container["livenessProbe"])
        assert spec["terminationGracePeriodSeconds"] == 33
        assert environment_of(workload)["X"] == "told"
        assert {"name": "more", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
        assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]


def test_a_null_takes_a_default_of_the_security_context_away(control_plane: ControlPlane) -> None:
    values = [f"api.podSecurityContext.{n}=null" for n in ("runAsUser", "runAsGroup", "fsGroup")]
    objects = render(control_plane, "default", *values, "redis.internal.runAsUser=null")
    for kind, component in (("Deployment", "api"), ("StatefulSet", "redis")):
        workload = find(objects, kind, f"mainstay-{component}")
        security = workload["spec"]["template"]["spec"]["securityContext"]
        assert {k for k, v in security.items() if v is not None} == {
            *("runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"),
        }


def test_a_name_that_is_too_long_is_cut_where_names_still_differ(
    control_plane: ControlPlane,
) -> None:
    long = "a-release-with-a-name-of-fifty-three-characters-12345"
    rendered = control_plane.helm("template", long, str(CHART), "-n", "n" * 63)
    names = [o["metadata"]["name"] for o in yaml.safe_load_all(rendered) if o]
    assert all(len(name) <= 63 for name in names if ":" not in name and "." not in name)
