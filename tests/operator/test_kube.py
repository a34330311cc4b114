"""What the operator makes of the API server's refusals, by a server that refuses as it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.operator.test_builders import NAMES, view
from tests.worlds.served_namespace import free_port

from mainstay_operator.actuator import Actuator
from mainstay_operator.builders import build_service
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.ownership import TakenName, keep_own
from mainstay_operator.resources import FINALIZER
from mainstay_operator.settings import parse

POD = {"kind": "Pod", "metadata": {"namespace": "n", "name": "demo-0"}}
Answer = tuple[int, dict[str, Any]]
CONFLICT: Answer = (409, {"reason": "Conflict", "message": "the quota has been modified"})
TAKEN: Answer = (409, {"reason": "AlreadyExists", "message": "there is one"})
FAILED: Answer = (422, {"reason": "Invalid", "message": "a test of the patch failed"})


def with_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[Answer],
    act: Callable[[KubeClient], Coroutine[Any, Any, Any]],
) -> tuple[Any, list[Any]]:
    """What a client did at a server that gives these answers, one after the other; the bodies."""
    port, bodies = free_port(), []
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({**config, "current-context": "c"}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json() if request.can_read_body else None)
        status, body = answers.pop(0)
        return web.json_response(body, status=status)

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            async with KubeClient(qps=1000, burst=1000, timeout_s=9, metrics=Metrics()) as kube:
                return await act(kube)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), bodies


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Any]]]:
    return lambda answers, act: with_server(tmp_path, monkeypatch, answers, act)


DETAILS: dict[str, dict[str, str]] = {
    "rights": {"kind": "pods"},
    "quota": {"kind": "pods", "name": "tiny-0"},
    "webhook": {},
}


@pytest.mark.parametrize("who", DETAILS)
def test_missing_rights_are_told_from_an_object_that_is_not_admitted(serve: Any, who: str) -> None:
    refusal = {"kind": "Status", "code": 403, "reason": "Forbidden", "details": DETAILS[who]}

    async def refused(kube: KubeClient) -> KubeError:
        with pytest.raises(KubeError) as raised:
            await kube.create(POD)
        return raised.value

    error, _ = serve([(403, {**refusal, "message": "is forbidden"})], refused)
    assert (error.status, error.unauthorized) == (403, who == "rights")


def test_a_conflict_over_a_quota_is_no_name_that_is_taken(serve: Any) -> None:
    made, bodies = serve([CONFLICT, CONFLICT, (201, POD)], lambda kube: kube.create(POD))
    assert (made, len(bodies)) == (POD, 3)

    assert serve([CONFLICT, TAKEN], lambda kube: kube.create(POD))[0] is None

    with pytest.raises(KubeError, match="quota"):
        serve([CONFLICT] * 9, lambda kube: kube.create(POD))


def test_a_finalizer_is_taken_away_from_where_it_is_now(serve: Any) -> None:
    job = view()
    listed = ("a.example.com/x", FINALIZER)
    metadata = {"uid": job.uid, "finalizers": [FINALIZER]}
    settings = {"MAINSTAY_API_URL": "u", "MAINSTAY_AGENT_IMAGE": "i", "MAINSTAY_TOKEN": "t"}

    def remove(kube: KubeClient) -> Any:
        actuator = Actuator(kube, parse([], settings), "me", Metrics())
        return actuator.remove_finalizer(dataclasses.replace(job, finalizers=listed))

    _, bodies = serve([FAILED, (200, {"metadata": metadata}), (200, {})], remove)
    removed = [body[-1]["path"] for body in bodies if body]
    assert removed == ["/metadata/finalizers/1", "/metadata/finalizers/0"]

    # A job of the same name that came later keeps its own.
    _, bodies = serve([FAILED, (200, {"metadata": {**metadata, "uid": "later"}})], remove)
    assert len(bodies) == 2

    changing: list[Answer] = [FAILED, (200, {"metadata": metadata})] * 9
    with pytest.raises(KubeError, match="finalizers change"):
        serve(changing, remove)


def test_an_object_that_is_made_in_the_same_moment_is_not_taken_over(serve: Any) -> None:
    job = view()
    body = build_service(job, NAMES)
    theirs = {"metadata": {"name": NAMES.shared, "uid": "s-1", "ownerReferences": []}}
    own = {"metadata": {**theirs["metadata"], "ownerReferences": [job.owner()]}}
    gone: Answer = (404, {"reason": "NotFound"})

    def keep(kube: KubeClient) -> Any:
        return keep_own(kube, job.uid, body, fixed=False)

    told, bodies = serve([gone, TAKEN, (200, theirs)], keep)
    assert told == TakenName(kind="Service", namespace="train", name=NAMES.shared)
    assert [sent for sent in bodies if sent] == [body]
    # Its own, made by this operator when an answer was lost, or by the one before.
    told, bodies = serve([gone, TAKEN, (200, own), (200, own)], keep)
    assert told is None
    # What takes its place meanwhile has another uid: the server refuses the apply.
    assert bodies[-1]["metadata"]["uid"] == "s-1"
    with pytest.raises(KubeError, match="comes and goes"):
        serve([gone, TAKEN, gone], keep)


def test_no_job_s_pods_run_as_an_account_of_mainstay_s_own(serve: Any) -> None:
    job = view()
    settings = {
        "MAINSTAY_API_URL": "u",
        "MAINSTAY_AGENT_IMAGE": "i",
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_OWN_ACCOUNTS": "system/api, train/demo",
    }

    def keep(kube: KubeClient) -> Any:
        actuator = Actuator(kube, parse([], settings), "me", Metrics())
        return actuator.keep_objects(job, job.old_object_names())

    (told,), bodies = serve([], keep)
    assert "ServiceAccount train/demo is that of operator or api" in told.describe()
    assert bodies == []
