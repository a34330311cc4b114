"""What one job and one caller may ask of the api: beyond it is refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.api.conftest import AGENT_TOKEN

from mainstay_api.auth import Caller
from mainstay_api.limits import (
    DEAR,
    KEEP_ALIVE_S,
    LONG_ANSWERS,
    MAX_CONNECTIONS,
    MAX_HELD,
    Asked,
    Limits,
    TooManyError,
    person_of,
)
from mainstay_api.settings import CLUSTER, LOCAL, Settings
from mainstay_core.base.errors import InvalidSpecError

CHART = Settings(redis_url="unix://", **CLUSTER)  # type: ignore[arg-type]
POD = Asked(
    caller=Caller(username="system:serviceaccount:team:job", pod="pod-0"),
    job="job",
    pod="pod-0",
    route="heartbeats",
    by_agent=True,
    num_bytes=200,
    num_pods=0,
    connection=("10.0.0.1", 1),
)
PERSON = replace(POD, caller=Caller(username="alice"), pod="", by_agent=False, route="summary")


class Counted:
    """Limits with a clock that stands until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.limits = Limits(CHART, lambda: self.now_s)

    def granted(self, asked: Asked, tries: int = 10_000) -> int:
        """How many requests of a kind are let through at once."""
        for number in range(tries):
            try:
                self.limits.take(asked)
            except TooManyError:
                return number
        return tries

    def wait_s(self, asked: Asked) -> float:
        with pytest.raises(TooManyError) as caught:
            self.limits.take(asked)
        return caught.value.wait_s


def test_a_pod_is_granted_its_burst_and_then_its_rate() -> None:
    counted = Counted()
    assert counted.granted(POD) == 200
    counted.now_s += 1.0
    assert counted.granted(POD) == 20


def test_a_pod_that_asks_too_much_is_in_nobodys_way() -> None:
    counted = Counted()
    counted.granted(POD)
    neighbour = replace(POD, pod="pod-1")
    assert counted.granted(neighbour) == 200
    assert counted.granted(replace(POD, route="ledger")) == 200, "nor in its own ledger's"
    assert counted.granted(replace(POD, job="other")) == 200


def test_all_pods_of_a_job_share_what_grows_with_the_job() -> None:
    for num_pods, total in ((0, 500), (10, 900), (1000, 40_500)):
        counted = Counted()
        pods = (replace(POD, pod=f"p{i}", num_pods=num_pods) for i in itertools.count())
        assert sum(itertools.takewhile(bool, (counted.granted(pod) for pod in pods))) == total
        assert counted.granted(replace(POD, job="other")) == 200


def test_bodies_are_counted_by_their_bytes() -> None:
    counted = Counted()
    large = replace(POD, route="restore", num_bytes=64 << 20)
    assert counted.granted(large) == 1
    assert counted.wait_s(large) == pytest.approx(6.0)  # 24 MiB are owed, 4 come each second
    assert counted.granted(replace(POD, job="other")) == 200
    assert counted.granted(POD) > 0, "the job's facts come through, whatever one pod restores"
    counted.now_s += 6.1
    assert counted.granted(large) == 1


def test_a_ledger_counts_by_its_entries() -> None:
    counted = Counted()
    assert counted.granted(replace(POD, route="ledger", num_bytes=512 * 100)) == 2


def test_facts_that_come_together_count_by_their_bytes() -> None:
    facts = replace(POD, route="facts")
    assert Counted().granted(facts) == 67, "three heartbeats each"
    assert Counted().granted(replace(facts, num_bytes=22_000)) == 25, "some hundred: eight each"
    assert Counted().granted(replace(facts, num_bytes=100_000)) == 8


@pytest.mark.parametrize("route", sorted(DEAR))
def test_requests_that_cost_more_than_a_heartbeat_count_as_more(route: str) -> None:
    counted = Counted()
    assert counted.granted(replace(POD, route=route)) == math.ceil(200 / DEAR[route])
    assert counted.granted(POD) == 0, "out of the same share"


def test_pods_are_eager_when_half_of_their_burst_is_used_up_until_it_is_there_again() -> None:
    counted = Counted()
    assert counted.granted(POD, 100) == 100
    assert not counted.limits.is_eager(POD)
    counted.granted(POD, 1)
    assert counted.limits.is_eager(POD)
    assert not counted.limits.is_eager(replace(POD, pod="pod-1"))
    assert not counted.limits.is_eager(replace(POD, job="other"))
    for pod in ("pod-1", "pod-2"):
        counted.granted(replace(POD, pod=pod), 100)
    assert counted.limits.is_eager(replace(POD, pod="pod-3")), "all of the job together"
    counted.now_s += 5.0
    assert not counted.limits.is_eager(POD)


def test_findings_count_by_themselves_and_take_nothing_from_facts() -> None:
    counted = Counted()
    assert counted.granted(replace(POD, route="findings", num_bytes=512 * 100)) == 2
    assert counted.granted(POD) == 200
    assert counted.granted(replace(POD, route="ledger")) == 200


def test_people_have_a_share_each_and_all_readers_of_a_job_have_one() -> None:
    counted = Counted()
    assert counted.granted(PERSON) == 200
    bob = replace(PERSON, caller=Caller(username="bob"))
    assert counted.granted(bob) == 200
    others = (replace(PERSON, caller=Caller(username=f"p{i}")) for i in range(100))
    assert sum(counted.granted(other) for other in others) == 600
    assert counted.granted(replace(bob, job="other")) == 0
    carol = replace(PERSON, caller=Caller(username="carol"), job="other")
    assert counted.granted(carol) == 200
    assert counted.granted(POD) == 200, "who reads a job is not in its way"


def test_whoever_makes_many_accounts_is_one_caller() -> None:
    counted = Counted()
    accounts = (Caller(username=f"system:serviceaccount:team:a{i}") for i in range(100))
    asked = (replace(PERSON, caller=caller, job="") for caller in accounts)
    assert sum(counted.granted(each) for each in asked) == 200
    assert person_of("system:serviceaccount:team:a") != person_of("system:serviceaccount:other:a")
    assert person_of("alice") == "alice"


@pytest.mark.parametrize("route", sorted(LONG_ANSWERS))
def test_long_answers_count_as_many(route: str) -> None:
    counted = Counted()
    assert counted.granted(replace(PERSON, route=route)) == 200 / LONG_ANSWERS[route]


def test_the_provider_is_never_refused_but_on_the_routes_of_supervisors() -> None:
    counted = Counted()
    operator = Caller(username="system:serviceaccount:mainstay:operator", is_provider=True)
    assert counted.granted(replace(PERSON, caller=operator), tries=5000) == 5000
    # In local mode there is one token for all.
    assert counted.granted(replace(POD, caller=operator)) == 200


def test_a_caller_keeps_few_connections_and_those_that_are_used() -> None:
    counted = Counted()

    def asks(number: int) -> bool:
        return counted.limits.may_keep(replace(POD, connection=("10.0.0.1", number)))

    assert [asks(i) for i in range(MAX_CONNECTIONS + 5)] == [True] * MAX_CONNECTIONS + [False] * 5
    assert asks(3)
    assert counted.limits.may_keep(replace(POD, pod="pod-1", connection=("10.0.0.1", 99)))
    counted.now_s += KEEP_ALIVE_S
    assert asks(1000), "the others have been closed by now"


def test_few_answers_are_held_back_at_a_time() -> None:
    async def run() -> tuple[int, int]:
        limits = Limits(CHART)
        refusal = TooManyError("you", 60.0)
        held = [asyncio.create_task(limits.hold(POD, refusal)) for _ in range(MAX_HELD + 5)]
        other = asyncio.create_task(limits.hold(replace(POD, job="other"), refusal))
        people = asyncio.create_task(limits.hold(PERSON, refusal))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting = sum(not task.done() for task in held)
        assert people.done()
        assert not other.done()
        for task in (*held, other):
            task.cancel()
        await asyncio.wait([*held, other])
        return waiting, len(limits._held)

    assert asyncio.run(run()) == (MAX_HELD, 0)


def test_a_refusal_is_held_back_as_long_as_it_asks_to_wait() -> None:
    async def run() -> bool:
        # The bucket lacks a little; who comes back at once is answered as dear as anybody.
        holding = asyncio.create_task(Limits(CHART).hold(POD, TooManyError("you", 0.02)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(holding), 0.2)
        still_held = not holding.done()
        await holding
        return still_held

    assert asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MAINSTAY_POD_REQUESTS_PER_S", "0"),
        ("MAINSTAY_JOB_REQUESTS_PER_S", "inf"),
        ("MAINSTAY_JOB_MIB_PER_S", "nan"),
        ("MAINSTAY_STREAMS_PER_POD", "2.5"),
        ("MAINSTAY_MAX_EVENTS", "10000001"),
        ("MAINSTAY_METRICS_PORT", "70000"),
        ("MAINSTAY_FAULT_INJECTION", "maybe"),
    ],
)
def test_a_bound_that_cannot_be_meant_is_named(name: str, text: str) -> None:
    environment = {"MAINSTAY_TOKEN": "t", "MAINSTAY_REDIS_URL": "redis://r"}
    settings = Settings.from_environment(environment)
    assert {field: getattr(settings, field) for field in LOCAL} == LOCAL
    assert settings.fault_injection
    with pytest.raises(InvalidSpecError) as caught:
        Settings.from_environment({**environment, name: text})
    assert caught.value.field == name


def test_a_refusal_says_when_to_come_back_and_others_go_on(
    new_api: Callable[..., Any], new_job: Callable[..., Any]
) -> None:
    api = new_api(pod_requests_per_s=4.0, job_requests_per_s=1000.0)
    loud, quiet = new_job(api), new_job(api)
    loud.start()
    beat = {"pod": "pod-0", "slots": [], "quorum": None}
    with api.new_client(AGENT_TOKEN) as client:
        client.headers["Mainstay-Pod"] = "pod-0"
        replies = (client.post(f"{loud.path}/agent/heartbeats", json=beat) for _ in range(1000))
        refused = next(reply for reply in replies if reply.status_code != 200)
    assert refused.status_code == 429
    assert refused.json()["error"] == "too-many"
    assert refused.headers["retry-after"] == str(refused.json()["retry_after_s"]) == "1"
    assert "close" in refused.headers["connection"]
    quiet.register("pod-0")
    assert api.get(loud.path)["state"] == "running"


def test_a_supervisors_body_is_shorter_than_others(api: Any, new_job: Any) -> None:
    job = new_job(api)
    body = {"facts": [], "supervisor": "x" * (1 << 20)}
    refused = job.agent("facts", body, status=413)
    assert refused["limit_bytes"] == 1 << 20
    assert "fewer" in refused["what_to_do"]
    # What is held for a lost store may be as long as it has to be: its fields are looked at.
    assert job.agent("restore", body, status=422)["error"] == "malformed"
