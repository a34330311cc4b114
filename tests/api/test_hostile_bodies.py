"""A pod's token writes what no pod would: the api refuses it by field, and stores none of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api.conftest import Api, Job
from tests.worlds import played

REGISTRATION = {
    "pod": "pod-9",
    "name": "pod-9",
    "address": "127.0.0.1",
    "gather": "pod-9:1",
    "num_slots": 1,
}
READ = (
    "",
    "/summary",
    "/pods",
    "/plan",
    "/members",
    "/recoveries",
    "/ledger",
    "/findings",
    "/lineage",
    "/events",
    "/report",
)

UNCHANGED = ("/plan", "/events", "/ledger", "/findings")


def post_text(job: Any, path: str, text: str) -> Any:
    """Send a body as it is: no client would write some of these."""
    return job.api.client.post(
        f"{job.path}/agent/{path}",
        content=text.encode("utf-8", "surrogatepass"),
        headers={"content-type": "application/json"},
    )


def raw(**change: Any) -> str:
    return json.dumps(REGISTRATION | change)


def fact(**change: Any) -> str:
    told = {"kind": "leaving", "pod": "pod-0", "format": 2} | change
    return json.dumps({"facts": [told]})


def entry(**change: Any) -> str:
    told = played.ledger_entry(0, 0, {"id": 1, "nonce": "n"})
    return json.dumps({"entries": [told | change]})


def finding(**change: Any) -> str:
    found = {
        "step": 0,
        "slot": {"pod": "pod-0", "index": 0},
        "in_pass": "forward",
        "ordinal": 0,
        "operator": "aten.mm",
        "num_elements": 1,
        "verdict": "primary",
        "remedy": "repair",
        "reason": "",
    }
    told = {"finding": found | change, "incarnation": "life", "number": 0, "at_s": 1.0}
    return json.dumps({"findings": [told]})


BODIES = {
    "a finding of a step after the last": ("findings", finding(step=10**9), "step"),
    "an operator of 1,000 characters": ("findings", finding(operator="x" * 1000), "operator"),
    "a verdict that there is not": ("findings", finding(verdict="guilty"), "verdict"),
    "a finding in a pass of its own": ("findings", finding(in_pass="sideways"), "in_pass"),
    "a thousand million slots": ("pods", raw(num_slots=10**9), "num_slots"),
    "more slots than a pod of the job has": ("pods", raw(num_slots=2), "num_slots"),
    "no slot": ("pods", raw(num_slots=0), "num_slots"),
    "a number of 5000 digits": ("pods", raw(num_slots=0).replace(": 0", ": " + "9" * 5000), ""),
    "half of a surrogate pair": ("pods", raw(name="\ud800"), "name"),
    "a name of a megabyte": ("pods", raw(name="x" * 1_000_000), "name"),
    "a negative pid": ("pods", raw(pid=-1), "pid"),
    "a time that is no number": ("facts", fact(observed_at_s=float("nan")), "observed_at_s"),
    "an infinite time": ("facts", fact(grace_s=float("inf")), "grace_s"),
    "a time of 1e999": ("facts", fact(grace_s=1).replace(": 1}", ": 1e999}"), "grace_s"),
    "evidence with a surrogate": ("facts", fact(evidence="\udfff"), "evidence"),
    "20,000 facts": (
        "facts",
        json.dumps({"facts": [{"kind": "leaving", "pod": "p"}] * 20_000}),
        "facts",
    ),
    "a slot of a million": (
        "facts",
        fact(kind="trainer-down", slot=10**6, incarnation="i"),
        "slot",
    ),
    "a loss that is no number": ("ledger", entry(loss=float("nan")), "loss"),
    "a stage that the job has not": ("ledger", entry(stage=7), "stage"),
    "an inner rank that the job has not": ("ledger", entry(inner=3), "inner"),
    "a step after the last": ("ledger", entry(step=10**9), "step"),
    "lists a hundred thousand deep": ("facts", "[" * 100_000, ""),
    "objects a hundred thousand deep": ("facts", '{"facts":' * 100_000, ""),
    "bytes that are no text": ("facts", '{"facts": "\udcff"}', ""),
}


@pytest.fixture(scope="module")
def job(shared_redis: Any) -> Iterator[Job]:
    """A job of which all bodies are told: none may leave anything of itself."""
    api = Api(shared_redis.url)
    job = Job(api)
    job.start()
    yield job
    api.stop()


@pytest.mark.parametrize("name", BODIES)
def test_what_no_pod_would_send_is_refused_by_its_field(job: Any, name: str) -> None:
    path, text, field = BODIES[name]
    before = [job.api.get(f"{job.path}{route}") for route in UNCHANGED]

    reply = post_text(job, path, text)

    assert reply.status_code in (400, 409, 413, 422), reply.text
    told = reply.json()
    assert told["error"]
    assert field in json.dumps(told)
    assert len(reply.content) < 5000
    assert [job.api.get(f"{job.path}{r}") for r in UNCHANGED] == before
    for route in READ:
        job.api.get(f"{job.path}{route}")


def test_nothing_of_a_request_is_stored_before_all_of_it_is_checked(job: Any) -> None:
    good, bad = json.loads(entry())["entries"], json.loads(entry(stage=7))["entries"]

    job.agent("ledger", {"entries": [*good, *bad]}, status=409)

    assert job.api.get(f"{job.path}/ledger") == []


def test_a_manifest_with_what_cannot_be_shown_is_refused(api: Any) -> None:
    before = api.get("/v1/jobs")
    for value in ('"\\ud800"', "NaN", "1e999", "[" * 80 + "]" * 80):
        text = '{"manifest": {"spec": {"workload": {"config": {"x": %s}}}}}' % value  # noqa: UP031
        reply = api.client.post(
            "/v1/jobs", content=text, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 422, reply.text
    assert api.get("/v1/jobs") == before
