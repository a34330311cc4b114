"""How long an answer of the API server is used, and what happens while it gives none."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mainstay_api.kube import KubeSettings, KubeUnavailableError
from mainstay_api.kube_auth import audiences_to_ask_for
from mainstay_api.reviews import MAX_REFUSALS, MAX_UNKNOWN, RETRY_S, Reviews
from mainstay_api.settings import Settings
from mainstay_core.base.errors import InvalidSpecError


class Server:
    """Answers what it is told to, and counts."""

    def __init__(self) -> None:
        self.answer: str | None = "yes"
        self.num_asked = 0
        self.now_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self) -> str:
        self.num_asked += 1
        await self.gate.wait()
        if self.answer is None:
            raise KubeUnavailableError("away")
        return self.answer

    def clock(self) -> float:
        return self.now_s


def reviews_of(server: Server, **bounds: float) -> Reviews[str]:
    return Reviews(clock=server.clock, **{"fresh_s": 30.0, **bounds})


async def ask(reviews: Reviews[str], server: Server, key: str = "token") -> str:
    return await reviews.ask(key, server.ask, lambda answer: answer == "yes")


def test_an_answer_is_used_until_it_is_no_longer_fresh() -> None:
    async def run() -> None:
        server = Server()
        reviews = reviews_of(server)
        await ask(reviews, server)
        server.answer = "no"
        server.now_s = 29.9
        assert await ask(reviews, server) == "yes"
        assert server.num_asked == 1
        server.now_s = 30.0
        assert await ask(reviews, server) == "no"

    asyncio.run(run())


def test_a_refusal_is_used_for_a_moment_only() -> None:
    async def run() -> None:
        server = Server()
        server.answer = "no"
        reviews = reviews_of(server, refused_s=2.0)
        await ask(reviews, server)
        server.answer = "yes"
        server.now_s = 1.9
        assert await ask(reviews, server) == "no"
        server.now_s = 2.0
        assert await ask(reviews, server) == "yes"

    asyncio.run(run())


def test_many_who_ask_the_same_are_one_question() -> None:
    async def run() -> None:
        server = Server()
        reviews = reviews_of(server)
        server.gate.clear()
        asking = [asyncio.create_task(ask(reviews, server)) for _ in range(100)]
        await asyncio.sleep(0)
        asking[0].cancel()
        server.gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        # The one that hung up took nobody's answer away.
        assert answers.count("yes") == 99
        assert server.num_asked == 1

    asyncio.run(run())


def test_another_token_is_another_question() -> None:
    async def run() -> None:
        server = Server()
        reviews = reviews_of(server)
        assert await ask(reviews, server, "one") == "yes"
        server.answer = "no"
        assert await ask(reviews, server, "two") == "no"

    asyncio.run(run())


def test_an_old_answer_stands_while_there_is_no_new_one_where_that_is_allowed() -> None:
    async def run() -> None:
        server = Server()
        patient, strict = reviews_of(server, stale_s=600.0), reviews_of(server)
        await ask(patient, server)
        await ask(strict, server)
        server.answer, server.now_s = None, 100.0
        with pytest.raises(KubeUnavailableError):
            await ask(strict, server)
        num_asked = server.num_asked
        assert await ask(patient, server) == "yes"
        assert await ask(patient, server) == "yes"
        assert server.num_asked == num_asked + 1, "each request would wait for the timeout"
        server.now_s += RETRY_S
        assert await ask(patient, server) == "yes"
        server.now_s = 600.0
        with pytest.raises(KubeUnavailableError):
            await ask(patient, server)

    asyncio.run(run())


def test_a_refusal_never_becomes_an_old_answer() -> None:
    async def run() -> None:
        server = Server()
        server.answer = "no"
        reviews = reviews_of(server, stale_s=600.0)
        await ask(reviews, server)
        server.answer, server.now_s = None, 10.0
        with pytest.raises(KubeUnavailableError):
            await ask(reviews, server)

    asyncio.run(run())


def test_ever_new_unknown_tokens_take_nothing_from_those_who_are_known() -> None:
    async def run() -> None:
        server = Server()
        reviews = reviews_of(server, refused_s=10.0)
        await ask(reviews, server, "known")
        server.answer = "no"
        for number in range(MAX_REFUSALS + 100):
            await ask(reviews, server, f"unknown {number}")
        asked = server.num_asked
        assert await ask(reviews, server, "known") == "yes"
        assert await ask(reviews, server, f"unknown {MAX_REFUSALS}") == "no"
        assert server.num_asked == asked, "both are remembered"
        assert await ask(reviews, server, "unknown 0") == "no"
        assert server.num_asked == asked + 1, "and the oldest of them are not"

    asyncio.run(run())


def test_few_ask_at_a_time_about_what_was_never_accepted() -> None:
    async def run() -> None:
        server = Server()
        reviews = reviews_of(server)
        await ask(reviews, server, "known")
        server.now_s, server.answer = 31.0, "no"
        server.gate.clear()
        strangers = [asyncio.create_task(ask(reviews, server, str(i))) for i in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert server.num_asked == 1 + MAX_UNKNOWN
        known = asyncio.create_task(ask(reviews, server, "known"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert server.num_asked == 2 + MAX_UNKNOWN, "who was known waits behind no stranger"
        server.gate.set()
        assert await asyncio.gather(*strangers) == ["no"] * 100
        await known

    asyncio.run(run())


def jwt(**claims: Any) -> str:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{body}.signature"


OURS = "mainstay.dev/api"


@pytest.mark.parametrize(
    ("token", "audiences"),
    [
        (jwt(aud=[OURS]), (OURS,)),
        (jwt(aud=OURS), (OURS,)),
        (jwt(aud=["https://kubernetes.default.svc", OURS]), (OURS,)),
        (jwt(aud=["https://kubernetes.default.svc"]), ("",)),
        (jwt(aud="mainstay.dev/jobs/uid"), ("",)),
        (jwt(aud="xmainstay.dev/api"), ("",)),
        (jwt(sub="somebody"), (OURS, "")),
        (jwt(aud=7), (OURS, "")),
        ("static-token", (OURS, "")),
        ("not.a.token", (OURS, "")),
        ("a.\u00e4.c", (OURS, "")),
        ("a." + "W1" * 2, (OURS, "")),
        ("a." + base64.urlsafe_b64encode(b"[" * 100_000).decode() + ".c", (OURS, "")),
    ],
)
def test_a_token_that_says_for_whom_it_is_meant_costs_one_review(
    token: str, audiences: tuple[str, ...]
) -> None:
    assert audiences_to_ask_for(token) == audiences


IN_A_POD = {
    "MAINSTAY_AUTH": "kubernetes",
    "MAINSTAY_REDIS_URL": "redis://mainstay-redis:6379/0",
    "MAINSTAY_OPERATOR_USER": "system:serviceaccount:mainstay-system:mainstay-operator",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
}


def test_in_a_pod_the_cluster_is_where_the_pod_is_told() -> None:
    settings = Settings.from_environment(IN_A_POD)
    account = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    assert settings.kube == KubeSettings(
        url="https://10.0.0.1:443", token_file=account / "token", ca_file=account / "ca.crt"
    )
    assert settings.admin_token == settings.agent_token == ""


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"MAINSTAY_AUTH": "none"}, "MAINSTAY_AUTH"),
        ({"MAINSTAY_OPERATOR_USER": ""}, "MAINSTAY_OPERATOR_USER"),
        ({"KUBERNETES_SERVICE_HOST": ""}, "MAINSTAY_KUBE_URL"),
        ({"MAINSTAY_KUBE_URL": "http://plain:8001"}, "MAINSTAY_KUBE_URL"),
        ({"MAINSTAY_REVIEW_CACHE_S": "0"}, "MAINSTAY_REVIEW_CACHE_S"),
        ({"MAINSTAY_AUTH": "token"}, "MAINSTAY_TOKEN"),
        ({"MAINSTAY_MAX_BODY_MIB": "0.5"}, "MAINSTAY_MAX_BODY_MIB"),
        ({"MAINSTAY_MAX_BODY_MIB": "0"}, "MAINSTAY_MAX_BODY_MIB"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        Settings.from_environment({**IN_A_POD, **change})
    assert caught.value.field == field
