"""The api's records of jobs that are no more, whether anybody has seen them go or not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from mainstay_core.base.ids import JobUid
from mainstay_core.job.spec import PLURAL
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.page import KnownJob
from mainstay_core.wire.routes import JobApi, Request
from mainstay_operator.kube import KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.records import Records, find_orphans
from mainstay_operator.relist import Relist
from mainstay_operator.resources import JobView
from mainstay_operator.settings import Settings, parse


def known(uid: str, namespace: str = "a") -> KnownJob:
    return KnownJob(uid=JobUid(uid), namespace=namespace)


class Api(JobApi):
    """An api that knows jobs, and fails as it is told."""

    def __init__(self, jobs: Mapping[str, str], *failures: Exception) -> None:
        self.jobs = dict(jobs)
        self.failures = list(failures)
        self.emptied = asyncio.Event()

    async def send(self, request: Request) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        if request.method == "GET":
            return [{"uid": u, "namespace": n, "step": 3} for u, n in self.jobs.items()]
        self.jobs.pop(request.path.rpartition("/")[2], None)
        if not self.jobs:
            self.emptied.set()
        return {"deleted": True}


class Kube:
    """A cluster without jobs whose API server refuses to list some namespaces."""

    def __init__(self, refused: Mapping[str, int], namespaces: Mapping[str, int]) -> None:
        self.refused, self.namespaces = refused, namespaces

    async def list(self, resource: str, namespace: str) -> list[dict[str, Any]]:
        assert resource == PLURAL
        if namespace in self.refused:
            raise KubeError("no", self.refused[namespace])
        return []

    async def fetch(self, resource: str, namespace: str, name: str) -> dict[str, Any] | None:
        assert (resource, namespace) == ("namespaces", "")
        status = self.namespaces.get(name, 200)
        if status not in (200, 404):
            raise KubeError("no", status)
        return {} if status == 200 else None


class Jobs:
    """What a resync tells of jobs."""

    unlisted: frozenset[str] = frozenset()

    def begin_list(self) -> None:
        pass

    def apply_list(self, listed: list[JobView], unlisted: set[str]) -> bool:
        self.unlisted = frozenset(unlisted)
        return bool(listed)


def settings(namespaces: str) -> Settings:
    needed = {"MAINSTAY_API_URL": "u", "MAINSTAY_AGENT_IMAGE": "i", "MAINSTAY_TOKEN": "t"}
    return parse([], {**needed, "MAINSTAY_NAMESPACES": namespaces})


def forgotten(kube: Kube, jobs: Mapping[str, str], namespaces: str) -> tuple[set[str], Any]:
    """The jobs that are forgotten by a resync, and the namespaces that were not listed."""

    async def run() -> tuple[set[str], Any]:
        api, told = Api(jobs), Jobs()
        records = Records(api)
        relist = Relist(
            kube=kube,  # type: ignore[arg-type]
            jobs=told,  # type: ignore[arg-type]
            records=records,
            nodes=None,
            metrics=Metrics(),
            settings=settings(namespaces),
        )
        await relist.list_all()
        running = asyncio.create_task(records.run())
        # Whatever it has to do it does without waiting for anybody.
        for _ in range(100):
            await asyncio.sleep(0)
        running.cancel()
        return jobs.keys() - api.jobs.keys(), told.unlisted

    return asyncio.run(run())


def test_orphans_are_what_the_api_knows_and_its_namespace_has_not() -> None:
    jobs = [known("1"), known("2"), known("3", "b"), known("4", "")]

    assert find_orphans(jobs, {"1"}, ("a",)) == ["2"]
    assert find_orphans(jobs, {"1"}, ("a", "b")) == ["2", "3"]
    # All namespaces were asked. A job without one is local mode's.
    assert find_orphans(jobs, {"1"}, ()) == ["2", "3"]


def test_a_job_that_was_deleted_while_nobody_looked_is_forgotten() -> None:
    assert forgotten(Kube({}, {}), {"1": "a", "2": "elsewhere"}, "a,b") == ({"1"}, frozenset())
    assert forgotten(Kube({}, {}), {"1": "a", "2": "elsewhere"}, "") == ({"1", "2"}, frozenset())


def test_what_cannot_be_listed_is_forgotten_only_if_its_namespace_is_gone() -> None:
    jobs = {"1": "a", "2": "b"}

    assert forgotten(Kube({"a": 403}, {"a": 404}), jobs, "a,b") == ({"1", "2"}, frozenset())
    # The namespace is there, or nobody says: the rights are what is missing.
    for status in (200, 403):
        kube = Kube({"a": 403}, {"a": status})
        assert forgotten(kube, jobs, "a,b") == ({"2"}, frozenset({"a"}))
    for kube in (Kube({"a": 500}, {}), Kube({"a": 403}, {"a": 500}), Kube({"": 403}, {})):
        with pytest.raises(KubeError):
            forgotten(kube, jobs, "" if "" in kube.refused else "a,b")


def test_the_api_is_asked_until_it_has_forgotten() -> None:
    away, broken = ApiError("away", Failure.UNREACHED), ApiError("broken", Failure.BROKEN)

    async def run() -> None:
        api = Api({"1": "a", "2": "a"}, away, broken, RuntimeError("a bug"))
        records = Records(api, again_s=0.0)
        for uid in ("1", "2", "never-was"):
            records.forget(uid)
        running = asyncio.create_task(records.run())
        await api.emptied.wait()
        running.cancel()

    asyncio.run(run())
