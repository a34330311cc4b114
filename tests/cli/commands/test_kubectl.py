"""What `kubectl mainstay` makes of its command line and of what the cluster says; tests/cluster has
the rest."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mainstay_cli.base.exits import UsageError
from mainstay_cli.cluster import kube
from mainstay_cli.cluster.jobs import ClusterJob, ClusterJobs, Options
from mainstay_cli.commands import kubectl, run_report
from mainstay_cli.local import runs
from mainstay_core.wire.api import ApiError, Failure

INSIDE = "http://mainstay-api.mainstay-system.svc:8080"
PROXY = "https://server:6443/api/v1/namespaces/{}/services/http:{}/proxy"


def member(replica: int | None, stage: int | None, inner: int | None, pod: str) -> dict[str, Any]:
    rank = "spare" if replica is None else f"r{replica}.s{stage}.i{inner}"
    return {"rank": rank, "replica": replica, "stage": stage, "inner": inner, "slot": f"{pod}/0"}


MEMBERS = [member(0, 0, 0, "j-0"), member(0, 1, 0, "j-1"), member(1, 0, 1, "j-4")]


class Pods(ClusterJobs):
    """A cluster whose pods are given."""

    def __init__(self, options: Options, told: str | None) -> None:
        super().__init__(options)
        self.access = kube.Access(url="https://server:6443", token="mine", namespace="research")
        env = [{"name": "MAINSTAY_API_URL", "value": told}] if told else []
        self.pods = [{"spec": {"initContainers": [{"env": env}], "containers": [{}]}}]

    def list_pods(self, job: ClusterJob) -> list[kube.Object]:  # noqa: ARG002 - there is one job
        return self.pods


def route(told: str | None, api: str | None = None) -> tuple[str, bool]:
    cluster = Pods(Options(api=api), told)
    manifest = {"metadata": {"name": "j", "namespace": "research", "uid": "u"}}
    found = cluster.find_route(ClusterJob(manifest, cluster))
    return found.url, found.through is not None


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "research", "status", "j", "--json"],
        ["status", "-n", "research", "j", "--json"],
        ["status", "j", "--json", "--namespace=research"],
    ],
)
def test_options_of_the_cluster_stand_anywhere(arguments: list[str]) -> None:
    options, rest = kubectl.parse_options(arguments)
    assert options == Options(namespace="research")
    assert rest == ["status", "j", "--json"]


@pytest.mark.parametrize(
    ("told", "api", "url", "through"),
    [
        (INSIDE, None, PROXY.format("mainstay-system", "mainstay-api:8080"), True),
        (INSIDE + "/", None, PROXY.format("mainstay-system", "mainstay-api:8080"), True),
        ("http://a.b.svc.cluster.local", None, PROXY.format("b", "a:80"), True),
        (None, None, PROXY.format("mainstay-system", "mainstay-api:8080"), True),
        ("https://api.example.com", None, "https://api.example.com", False),
        (INSIDE, "ops/api:9", PROXY.format("ops", "api:9"), True),
        (INSIDE, "http://127.0.0.1:1/", "http://127.0.0.1:1", False),
    ],
)
def test_the_api_is_where_the_user_says_or_the_pods_were_told_or_as_usual(
    told: str | None, api: str | None, url: str, through: bool
) -> None:
    assert route(told, api) == (url, through)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="neither NAMESPACE/SERVICE:PORT nor a URL"):
        route(INSIDE, "somewhere")


@pytest.mark.parametrize(
    ("rank", "pod"), [("r0.s0", "j-0"), ("r0.s1.i0", "j-1"), ("r1.s0.i1", "j-4")]
)
def test_a_rank_is_served_by_a_pod(rank: str, pod: str) -> None:
    assert kubectl.find_pod(MEMBERS, rank) == pod


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("r1.s1", "nobody serves r1.s1 now; there are: r0.s0.i0, r0.s1.i0, r1.s0.i1"),
        ("0", "'0' is no rank; name one as in status, e.g. r1.s0"),
    ],
)
def test_a_rank_that_nobody_serves_is_named_with_those_that_are(rank: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kubectl.find_pod([*MEMBERS, member(None, None, None, "j-9")], rank)


def test_without_a_token_a_service_account_has_to_be_named() -> None:
    cluster = Pods(Options(), None)
    cluster.access = kube.Access(url="https://server:6443")
    with pytest.raises(UsageError, match="name a ServiceAccount that may get trainingjobs"):
        _ = cluster.token


def test_conditions_worth_a_look_are_shown() -> None:
    def condition(kind: str, status: str, reason: str = "R") -> dict[str, str]:
        return {"type": kind, "status": status, "reason": reason, "message": f"{kind} is {status}"}

    status = {
        "state": "Recovering",
        "ready": "3/4",
        "spares": "0/1",
        "conditions": [
            condition("Initialized", "True"),
            condition("Ready", "False"),
            condition("Degraded", "True"),
            condition("Recovering", "False"),
            condition("Protected", "True"),
            condition("SparesAvailable", "False", "NoneWanted"),
            condition("Exact", "False", "StageReinitialised"),
        ],
    }
    text = kubectl.render_object({"metadata": {"namespace": "n", "name": "j"}, "status": status})
    assert text.splitlines() == [
        "n/j: Recovering, pods ready 3/4, spares 0/1",
        "  Ready: Ready is False",
        "  Degraded: Degraded is True",
        "  Exact: Exact is False",
    ]
    assert not kubectl.is_worth_a_look(condition("Exact", "True", "AsUndisturbed"))
    assert kubectl.is_worth_a_look(condition("Ready", "Unknown", "ApiUnreachable"))


def unseen(age_s: float, **fields: Any) -> str:
    """What is said of a job of this age."""
    made = "2026-11-22T10:00:00Z"
    metadata = {"name": "j", "namespace": "research", "creationTimestamp": made}
    now_s = datetime.fromisoformat(made).timestamp() + age_s
    return kubectl.explain_unseen({"metadata": metadata, **fields}, now_s)


def test_a_job_that_nobody_watches_is_told_so() -> None:
    said = unseen(75.0)
    assert said.startswith("no operator has looked at it in 75 s: none seems to serve namespace")
    assert "--set watchNamespaces='{OTHERS,research}'" in said
    assert unseen(75.0, status={"conditions": []}) == said
    assert unseen(59.0) == ""
    assert unseen(75.0, status={"observedGeneration": 1}) == ""
    kueue = {"managedBy": "kueue.x-k8s.io/multikueue"}
    assert unseen(0.0, spec=kueue).startswith("spec.managedBy is kueue.x-k8s.io/multikueue: ")
    assert unseen(75.0, spec={"managedBy": "mainstay.dev/operator"}) == said


class Unserved(Pods):
    """A cluster whose api does not know the job, or cannot be asked."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Options(), None)
        self.error = error

    def connect(self, job: ClusterJob) -> Any:  # noqa: ARG002 - there is one job
        raise self.error


def test_status_says_so_of_a_job_that_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its age is what the API server's clock says, whatever this machine's does."""
    made = {"name": "j", "namespace": "research", "uid": "u"}
    made["creationTimestamp"] = "2036-11-22T10:00:00Z"

    def show(after: str, error: Exception, *, as_json: bool = False) -> str:
        date = {"Date": f"Sat, 22 Nov 2036 {after} GMT"}
        answer = httpx.Response(200, json={"metadata": made}, headers=date)
        cluster = Unserved(error)
        transport = httpx.MockTransport(lambda _: answer)
        http = httpx.Client(base_url="https://server:6443", transport=transport)
        monkeypatch.setattr(cluster.kube, "_http", http)
        before = runs.PLACE.set(cluster)
        try:
            kubectl.show_status("j", as_json=as_json)
        finally:
            runs.PLACE.reset(before)
        return capsys.readouterr().out

    unknown = ApiError("there is no such job", Failure.UNKNOWN)
    assert "no operator has looked at it in 120 s" in show("10:02:00", unknown)
    told = json.loads(show("10:02:00", UsageError("no token"), as_json=True))
    assert told["problem"].startswith("no operator has looked")
    # An api that cannot be reached is a second thing to look at, however old the job is.
    assert told["problem"].endswith("no token")
    # A job that has just been made is given time.
    assert "there is no such job" in show("10:00:30", unknown)
    with pytest.raises(UsageError):
        show("10:00:30", UsageError("no token"))


@pytest.mark.parametrize("user", [{"token": "secret"}, {"client-certificate": "x"}])
def test_a_kubeconfig_is_read_as_kubectl_reads_it(tmp_path: Path, user: dict[str, str]) -> None:
    pytest.importorskip("kubernetes")
    context = {"cluster": "c", "user": "u", "namespace": "research"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": {"server": "http://server:1"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [
            {"name": "one", "context": context},
            {"name": "other", "context": {"cluster": "c", "user": "u"}},
        ],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    access = kube.load_access(str(path), None)
    assert (access.url, access.namespace) == ("http://server:1", "research")
    assert access.token == user.get("token", "")
    assert kube.load_access(str(path), "other").namespace == "default"
    with pytest.raises(UsageError, match="no cluster"):
        kube.load_access(str(path), "third")


def test_without_a_cluster_jobs_are_looked_for_on_this_machine() -> None:
    assert runs.PLACE.get() is None


class ReportingApi:
    """An api that knows one report."""

    async def __aenter__(self) -> ReportingApi:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def fetch(self, job: str, what: str) -> dict[str, Any]:
        return {"uid": job, "what": what, "state": "running", "steps": {"committed": 3}}


class Reporting(Pods):
    """A cluster with one job, whose api answers."""

    def find(self, name: str | None) -> ClusterJob:
        manifest = {"metadata": {"name": name, "namespace": "research", "uid": "u"}}
        return ClusterJob(manifest, self)

    def connect(self, job: ClusterJob) -> Any:  # noqa: ARG002 - there is one job
        return ReportingApi()


def test_a_report_is_printed_or_written_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = runs.PLACE.set(Reporting(Options(), None))
    try:
        run_report.show("j", None)
        printed = json.loads(capsys.readouterr().out)
        assert (printed["uid"], printed["what"]) == ("u", "report")
        file = tmp_path / "j.json"
        run_report.show("j", file)
        assert json.loads(file.read_text()) == printed
        said = capsys.readouterr().out
        assert said == f"j: running, 3 steps committed; report written to {file}\n"
        with pytest.raises(UsageError, match=r"--output: .*: Is a directory"):
            run_report.show("j", tmp_path)
    finally:
        runs.PLACE.reset(before)


def test_the_checks_of_a_job_in_a_cluster_are_shown_as_those_of_a_local_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"stage": 1, "plan": "Auto", "shares": "P 60 %, inter 40 %", "reason": "planned"}
    shown = {"dmr_coverage": "stage 1: P 60 %, inter 40 %", "checks": [told]}

    class Api:
        async def __aenter__(self) -> Api:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

        async def fetch(self, job: str) -> dict[str, Any]:
            assert job == "u"
            return shown

    class Job:
        name, job = "llama", "u"

        def is_running(self) -> bool:
            return True

        def connect(self) -> Api:
            return Api()

    monkeypatch.setattr(runs, "find", lambda _: Job())

    ended = CliRunner().invoke(kubectl.app, ["dmr", "show", "llama"])

    assert ended.exit_code == 0, ended.output
    assert ended.output == "stage 1: plan Auto, P 60 %, inter 40 %\n  planned\n"
    asked = CliRunner().invoke(kubectl.app, ["dmr", "show", "llama", "--json"])
    assert json.loads(asked.output)["stages"] == [told]
