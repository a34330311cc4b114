"""Who is let in by a real API server: every kind of wrong token, on every route there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.cluster.control_plane import ControlPlane
from tests.worlds.installed_chart import SPEC, InstalledChart, Pod, routes_of

PUBLIC = {"/healthz", "/readyz"}
METRICS = "/metrics"
DOCS = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
"""Say what the api is like, and nothing of any job."""
OPERATOR_ONLY = {
    ("POST", "/v1/jobs"),
    ("DELETE", "/v1/jobs/{job}"),
    ("POST", "/v1/jobs/{job}/provider/facts"),
    ("POST", "/v1/jobs/{job}/provider/faults/{fault}/fired"),
    ("POST", "/v1/jobs/{job}/provider/topology"),
}


@pytest.fixture(scope="module")
def world(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> InstalledChart:
    return InstalledChart(control_plane, tmp_path_factory.mktemp("world"))


@dataclass
class Town:
    """An api in that world, with two jobs of one name and one of another."""

    world: InstalledChart
    api: Any
    ours: str
    theirs: str
    uids: dict[str, str]
    pods: dict[str, Pod]

    def client(self, token: str, pod: str = "") -> httpx.Client:
        client: httpx.Client = self.api.new_client(token)
        if pod:
            client.headers["Mainstay-Pod"] = pod
        return client

    def submit(self, uid: str, namespace: str, name: str) -> None:
        manifest = {
            "apiVersion": "mainstay.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": SPEC,
        }
        body = {"manifest": manifest, "uid": uid, "namespace": namespace}
        with self.client(self.world.operator) as client:
            assert client.post("/v1/jobs", json=body).status_code == 201

    def statuses(
        self, token: str, paths: list[tuple[str, str]], job: str, pod: str = "", told: str = ""
    ) -> dict[tuple[str, str], int]:
        """What each route answers to a token."""
        found = {}
        with self.client(token, pod) as client:
            for method, path in paths:
                url = path.replace("{job}", job).replace("{fault}", "f")
                body: dict[str, Any] = {"pod": told, "facts": [{"pod": told}]} if told else {}
                if told and path.endswith("/findings"):
                    body = {"findings": [{"finding": {"slot": {"pod": told, "index": 0}}}]}
                content = {} if method in ("GET", "HEAD") else {"json": body}
                # A stream that is let in would never end: its first line is enough.
                with client.stream(method, url, **content) as reply:
                    found[method, path] = reply.status_code
                    if reply.status_code in (401, 403) and method != "HEAD":
                        reply.read()
                        assert {"error", "detail", "what_to_do"} <= set(reply.json())
        return found


@pytest.fixture(scope="module")
def town(world: InstalledChart, shared_redis: Any) -> Iterator[Town]:
    from tests.api.conftest import Api

    ours, theirs = (world.plane.make_namespace() for _ in range(2))
    api = Api(
        shared_redis.url,
        auth="kubernetes",
        kube=world.kube_settings(),
        operator_user=world.operator_user,
        # The answers of this moment: how long they are used is another test's affair.
        review_cache_s=0.001,
        keep_alive_s=0.1,
        # So is how often one may ask.
        pod_requests_per_s=1e6,
        job_requests_per_s=1e6,
        person_requests_per_s=1e6,
    )
    names = {"alpha": (ours, "alpha"), "beta": (ours, "beta"), "other": (theirs, "alpha")}
    uids = {key: world.make_job(*place) for key, place in names.items()}
    pods = {
        f"{key}-{i}": world.make_pod(*place, f"{place[1]}-{i}")
        for key, place in names.items()
        for i in range(2)
    }
    made = Town(world, api, ours, theirs, uids, pods)
    for key, (namespace, name) in names.items():
        made.submit(uids[key], namespace, name)
    yield made
    api.stop()


@pytest.fixture
def agent_routes(town: Town) -> list[tuple[str, str]]:
    return [r for r in routes_of(town.api.app) if "/agent/" in r[1]]


@pytest.fixture
def other_routes(town: Town) -> list[tuple[str, str]]:
    known = PUBLIC | DOCS | {METRICS}
    return [r for r in routes_of(town.api.app) if "/agent/" not in r[1] and r[1] not in known]


WRONG_AGENTS: dict[str, Callable[[Town], str]] = {
    "no token": lambda _: "",
    "no token at all": lambda _: "not.a.token",
    "a stranger's": lambda t: t.world.person(t.theirs, None),
    "a person's who may edit the job": lambda t: t.world.person(t.ours, "edit"),
    "the operator's": lambda t: t.world.operator,
    "another job's": lambda t: t.world.pod_token(t.pods["beta-0"], t.uids["beta"]),
    "another job's, made for this one": lambda t: t.world.pod_token(
        t.pods["beta-0"], t.uids["alpha"]
    ),
    "that of a job of this name elsewhere": lambda t: t.world.pod_token(
        t.pods["other-0"], t.uids["other"]
    ),
    "the same, made for this one": lambda t: t.world.pod_token(t.pods["other-0"], t.uids["alpha"]),
    "another rank's": lambda t: t.world.pod_token(t.pods["alpha-1"], t.uids["alpha"]),
    "one that is bound to no pod": lambda t: t.world.token(
        t.ours, t.pods["alpha-0"].account, f"mainstay.dev/jobs/{t.uids['alpha']}"
    ),
    "the pod's, meant for the API server": lambda t: t.world.token(
        t.ours, t.pods["alpha-0"].account, None, t.pods["alpha-0"]
    ),
}


@pytest.mark.parametrize("kind", sorted(WRONG_AGENTS))
def test_a_wrong_token_is_refused_on_every_route_of_agents(
    town: Town, agent_routes: list[tuple[str, str]], kind: str
) -> None:
    token = WRONG_AGENTS[kind](town)
    pod = town.pods["alpha-0"].uid
    statuses = town.statuses(token, agent_routes, town.uids["alpha"], pod, told=pod)
    assert len(statuses) >= 8
    assert set(statuses.values()) <= {401, 403}, statuses


@pytest.mark.parametrize("kind", sorted(WRONG_AGENTS))
def test_an_agents_wrong_token_is_refused_for_a_job_that_the_store_has_lost(
    town: Town, agent_routes: list[tuple[str, str]], kind: str
) -> None:
    uid = town.world.make_job(town.ours, "lost")
    pod = town.world.plane.api.find(f"/api/v1/namespaces/{town.ours}/pods/lost-0")
    made = (
        Pod("lost-0", pod["metadata"]["uid"], pod["spec"]["serviceAccountName"], town.ours)
        if pod
        else town.world.make_pod(town.ours, "lost", "lost-0")
    )
    uids = {**town.uids, "alpha": uid}
    lost = Town(town.world, town.api, town.ours, town.theirs, uids, town.pods)
    statuses = lost.statuses(WRONG_AGENTS[kind](lost), agent_routes, uid, made.uid, told=made.uid)
    assert set(statuses.values()) <= {401, 403}, statuses


def test_a_deleted_pods_token_is_refused_on_every_route(
    town: Town, agent_routes: list[tuple[str, str]], other_routes: list[tuple[str, str]]
) -> None:
    pod = town.world.make_pod(town.ours, "alpha", "alpha-9")
    token = town.world.pod_token(pod, town.uids["alpha"])
    town.world.plane.api.delete(f"/api/v1/namespaces/{town.ours}/pods/alpha-9")
    path = f"/v1/jobs/{town.uids['alpha']}/agent/plan"
    with town.client(token, pod.uid) as client:
        # The API server learns of the deletion by a watch of its own.
        while client.get(path).status_code != 401:
            pass
    routes = [*agent_routes, *other_routes]
    statuses = town.statuses(token, routes, town.uids["alpha"], pod.uid, told=pod.uid)
    assert set(statuses.values()) == {401}, statuses


def test_the_right_token_is_let_in_on_every_route_of_agents(
    town: Town, agent_routes: list[tuple[str, str]]
) -> None:
    pod = town.pods["alpha-0"]
    token = town.world.pod_token(pod, town.uids["alpha"])
    statuses = town.statuses(token, agent_routes, town.uids["alpha"], pod.uid, told=pod.uid)
    # Their bodies are nonsense, which is another matter.
    assert not {401, 403} & set(statuses.values()), statuses


def test_a_pod_speaks_for_itself_only(town: Town, agent_routes: list[tuple[str, str]]) -> None:
    mine, other = town.pods["alpha-0"].uid, town.pods["alpha-1"].uid
    token = town.world.pod_token(town.pods["alpha-0"], town.uids["alpha"])
    with_body = [r for r in agent_routes if r[0] not in ("GET", "HEAD")]
    told = town.statuses(token, with_body, town.uids["alpha"], mine, told=other)
    assert set(told.values()) == {403}, told
    named = town.statuses(token, agent_routes, town.uids["alpha"], other, told=mine)
    assert set(named.values()) == {403}, named
    unnamed = town.statuses(token, agent_routes, town.uids["alpha"], "", told=mine)
    assert set(unnamed.values()) == {403}, unnamed


WRONG_PEOPLE: dict[str, Callable[[Town], str]] = {
    "no token": lambda _: "",
    "no token at all": lambda _: "not.a.token",
    "a stranger's": lambda t: t.world.person(t.theirs, None),
    "that of somebody who may edit elsewhere": lambda t: t.world.person(t.theirs, "edit"),
    "one meant for somebody else": lambda t: t.world.person(t.ours, "edit", audience="vault"),
    "a pod's of the job": lambda t: t.world.pod_token(t.pods["alpha-0"], t.uids["alpha"]),
    "the operator's, meant for the API server": lambda t: t.world.token(
        t.world.system, "mainstay-operator"
    ),
    "the api's own": lambda t: t.world.token(t.world.system, "mainstay-api", "mainstay.dev/other"),
}


@pytest.mark.parametrize("kind", sorted(WRONG_PEOPLE))
def test_a_wrong_token_is_refused_on_every_other_route(
    town: Town, other_routes: list[tuple[str, str]], kind: str
) -> None:
    statuses = town.statuses(WRONG_PEOPLE[kind](town), other_routes, town.uids["alpha"])
    assert len(statuses) >= 15
    if kind == "that of somebody who may edit elsewhere":
        # They see the jobs there.
        assert statuses.pop(("GET", "/v1/jobs")) == 200
    if kind == "the operator's, meant for the API server":
        # Its own rights in the cluster, no more: it may read and patch, as it has to.
        statuses = {route: statuses[route] for route in OPERATOR_ONLY}
    assert set(statuses.values()) <= {401, 403}, statuses


def test_who_may_get_the_job_reads_and_changes_nothing(
    town: Town, other_routes: list[tuple[str, str]]
) -> None:
    for audience in ("mainstay.dev/api", None):
        viewer = town.world.person(town.ours, "view", audience=audience)
        for (method, path), status in town.statuses(
            viewer, other_routes, town.uids["alpha"]
        ).items():
            # The job keeps no snapshots, which whoever may read is told.
            found = 404 if "/snapshots" in path else 200
            expected = found if method in ("GET", "HEAD") else 403
            assert status == expected, (method, path, status)


def test_who_may_patch_the_job_changes_it_and_is_no_operator(
    town: Town, other_routes: list[tuple[str, str]]
) -> None:
    editor = town.world.person(town.ours, "edit")
    statuses = town.statuses(editor, other_routes, town.uids["beta"])
    refused = {route for route, status in statuses.items() if status in (401, 403)}
    assert refused == OPERATOR_ONLY


def test_a_user_of_the_cluster_is_known_by_the_token_that_kubectl_sends(town: Town) -> None:
    path = f"/v1/jobs/{town.uids['alpha']}"
    with town.client(town.world.plane.tokens["alice"]) as client:
        assert client.get(path).status_code == 403
        town.world.grant(town.ours, "view", "alice")
    # A refusal is kept for a moment: ask as bob, who had none.
    town.world.grant(town.ours, "edit", "bob")
    with town.client(town.world.plane.tokens["bob"]) as client:
        while client.get(path).status_code != 200:
            pass


def test_jobs_of_one_name_are_two_and_are_listed_to_whom_they_belong(town: Town) -> None:
    viewer = town.world.person(town.theirs, "view")
    with town.client(viewer) as client:
        listed = client.get("/v1/jobs").json()
        assert [(j["namespace"], j["name"], j["uid"]) for j in listed] == [
            (town.theirs, "alpha", town.uids["other"])
        ]
        assert client.get("/v1/jobs", params={"namespace": town.ours}).status_code == 403
        by_name = client.get(f"/v1/jobs/{town.theirs}:alpha").json()
        assert by_name["uid"] == town.uids["other"]
        assert client.get(f"/v1/jobs/{town.ours}:alpha").status_code == 403
        assert client.get("/v1/jobs/alpha").status_code == 404
    with town.client(town.world.operator) as client:
        seen = {j["uid"] for j in client.get("/v1/jobs").json()}
        assert seen >= set(town.uids.values())


def test_a_pod_restores_its_own_job_and_nobody_elses(town: Town) -> None:
    uid = town.world.make_job(town.ours, "forgotten")
    pod = town.world.make_pod(town.ours, "forgotten", "forgotten-0")
    with town.client(town.world.operator) as client:
        body = {
            "manifest": {
                "apiVersion": "mainstay.dev/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "forgotten"},
                "spec": SPEC,
            },
            "uid": town.uids["alpha"] + "x",
            "namespace": town.ours,
        }
        assert client.post("/v1/jobs", json=body).status_code == 201
    pod_of_alpha = town.pods["alpha-0"]
    with town.client(
        town.world.pod_token(pod_of_alpha, town.uids["alpha"]), pod_of_alpha.uid
    ) as client:
        registration = {
            "pod": pod_of_alpha.uid,
            "name": pod_of_alpha.name,
            "address": "127.0.0.1",
            "gather": "a:1",
            "num_slots": 1,
        }
        path = f"/v1/jobs/{town.uids['alpha']}/agent/pods"
        config = client.post(path, json=registration).json()["config"]
    mine = {**config, "job": uid, "name": "forgotten"}
    with town.client(town.world.pod_token(pod, uid), pod.uid) as client:
        path = f"/v1/jobs/{uid}/agent"
        assert client.get(f"{path}/plan").status_code == 404
        foreign = {"pod": pod.uid, "config": {**mine, "namespace": town.theirs}}
        assert client.post(f"{path}/restore", json=foreign).status_code == 403
        renamed = {"pod": pod.uid, "config": {**mine, "name": "alpha"}}
        assert client.post(f"{path}/restore", json=renamed).status_code == 403
        assert (
            client.post(f"{path}/restore", json={"pod": pod.uid, "config": mine}).status_code == 200
        )
        assert client.get(f"{path}/plan").status_code == 200


def test_pods_that_the_version_before_began_are_known_by_an_account_with_the_jobs_name(
    town: Town,
) -> None:
    uid = town.world.make_job(town.ours, "older")
    for account in ("older", "builder"):
        town.world.make_account(town.ours, account)
    mine = town.world.make_pod(town.ours, "older", "older-0", account="older")
    others = town.world.make_pod(town.ours, "older", "older-1", account="builder")
    path = f"/v1/jobs/{uid}/agent/plan"
    # The store does not know the job: the cluster says whose the account is.
    for pod, status in ((mine, 404), (others, 403)):
        with town.client(town.world.pod_token(pod, uid), pod.uid) as client:
            assert client.get(path).status_code == status


def test_pods_are_known_by_the_account_that_their_jobs_template_names(town: Town) -> None:
    named = {**SPEC["template"]["spec"], "serviceAccountName": "cloud"}
    uid = town.world.make_job(town.ours, "identity", {**SPEC, "template": {"spec": named}})
    for account in ("cloud", "no-cloud"):
        town.world.make_account(town.ours, account)
    mine = town.world.make_pod(town.ours, "identity", "identity-0", account="cloud")
    others = town.world.make_pod(town.ours, "identity", "identity-1", account="no-cloud")
    twin = town.world.make_job(town.ours, "twin", {**SPEC, "template": {"spec": named}})
    path = f"/v1/jobs/{uid}/agent/plan"
    for is_known in (False, True):
        # At first the store does not know the job: the cluster says whose the account is.
        if is_known:
            town.submit(uid, town.ours, "identity")
        for pod, expected in ((mine, 200 if is_known else 404), (others, 403)):
            with town.client(town.world.pod_token(pod, uid), pod.uid) as client:
                assert client.get(path).status_code == expected
        # Nor does an account that two jobs have make one's pod the other's.
        for another in (town.uids["alpha"], twin):
            with town.client(town.world.pod_token(mine, another), mine.uid) as client:
                assert client.get(f"/v1/jobs/{another}/agent/plan").status_code == 403


def test_a_submission_names_where_its_job_is(town: Town) -> None:
    with town.client(town.world.operator) as client:
        for body, field in (({"uid": "u"}, "namespace"), ({"namespace": "n"}, "uid")):
            reply = client.post("/v1/jobs", json=body)
            assert (reply.status_code, reply.json()["field"]) == (422, field)


def test_an_api_server_that_is_away_is_no_refusal(
    world: InstalledChart, town: Town, new_api: Callable[..., Any]
) -> None:
    settings = world.kube_settings(url="https://127.0.0.1:9")
    api = new_api(auth="kubernetes", kube=settings, operator_user=world.operator_user)
    with api.new_client(world.operator) as client:
        reply = client.get("/v1/jobs")
        assert (reply.status_code, reply.json()["error"]) == (503, "auth-unavailable")


def test_the_list_of_routes_is_whole(town: Town) -> None:
    served = {path for _, path in routes_of(town.api.app)}
    assert set(town.api.app.openapi()["paths"]) <= served
    for path in PUBLIC | {METRICS}:
        assert path in served


def test_metrics_are_for_who_may_get_their_path_in_the_cluster(town: Town) -> None:
    """They name all jobs, so no right to one of them is enough."""
    pod = town.pods["alpha-0"]
    refused = {
        "nobody": "",
        "a pod": town.world.pod_token(pod, town.uids["alpha"]),
        "who may edit a job": town.world.person(town.ours, "edit"),
        "the same, by kubectl's token": town.world.person(town.ours, "edit", audience=None),
    }
    for who, token in refused.items():
        with town.client(token) as client:
            assert client.get(METRICS).status_code in (401, 403), who
    role = f"{town.world.system}:mainstay:metrics-reader"
    name = f"prometheus-{town.ours}"
    town.world.make_account(town.ours, name)
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": town.ours}],
    }
    town.world.plane.api.apply(binding)
    # As Prometheus sends it: the token of its own pod, meant for the API server.
    with town.client(town.world.token(town.ours, name)) as client:
        while client.get(METRICS).status_code != 200:
            pass  # the API server learns of the right by a watch of its own
        assert "mainstay_api_request_seconds" in client.get(METRICS).text


def test_a_stream_ends_when_its_pods_token_is_good_no_more(town: Town) -> None:
    # A job of its own: others are told to stop by who may, and their streams say so.
    uid = town.world.make_job(town.ours, "streaming")
    town.submit(uid, town.ours, "streaming")
    pod = town.world.make_pod(town.ours, "streaming", "streaming-0")
    token = town.world.pod_token(pod, uid)
    path = f"/v1/jobs/{uid}/agent/stream"
    with town.client(token, pod.uid) as client, client.stream("GET", path) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        assert next(lines).startswith(":"), "it is looked at, and stays"
        next(lines)
        assert next(lines).startswith(":")
        town.world.plane.api.delete(f"/api/v1/namespaces/{town.ours}/pods/streaming-0")
        assert all(line == "" or line.startswith(":") for line in lines)
    with town.client(token, pod.uid) as client:
        assert client.get(path).status_code == 401
