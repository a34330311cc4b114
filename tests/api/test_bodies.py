"""What of a request is read: nothing of a stranger's body, and of nobody's more than the limit."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from tests.api.conftest import AGENT_TOKEN, MANIFEST, TOKEN
from tests.worlds.installed_chart import routes_of

from mainstay_api.app import create_app
from mainstay_api.auth import Caller
from mainstay_api.bodies import BodyLimitMiddleware
from mainstay_api.limits import AT_ONCE_OF_JOB, Asked
from mainstay_api.settings import Settings
from mainstay_api.store import RedisStore
from mainstay_core.base.ids import JobUid
from mainstay_core.job.spec import parse_training_job

MIB = 1 << 20
OPEN = {"/healthz", "/readyz"}
OPEN |= {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    taken: int
    """Bytes of the request's body that were read."""

    @property
    def ended_the_connection(self) -> bool:
        return self.headers.get("connection") == "close"

    def assert_names_the_limit(self) -> None:
        assert self.status == 413
        told = json.loads(self.body)
        assert (told["error"], told["limit_bytes"]) == ("body-too-large", MIB)
        assert "1 MiB" in told["detail"]
        assert "MAINSTAY_MAX_BODY_MIB" in told["what_to_do"]


async def ask(
    app: FastAPI, method: str, path: str, token: str, size: int, *, announced: bool
) -> Answer:
    """Send a body of ``size`` spaces, piece by piece as it is asked for."""
    left, taken, status, body = size, 0, 0, b""
    headers = [(b"content-type", b"application/json")]
    if token:
        headers.append((b"authorization", f"Bearer {token}".encode()))
    length = (b"content-length", str(size).encode())
    headers.append(length if announced else (b"transfer-encoding", b"chunked"))
    answered: dict[str, str] = {}

    async def receive() -> dict[str, Any]:
        nonlocal left, taken
        if not left:
            return {"type": "http.disconnect"}
        piece = min(left, MIB // 2)
        left, taken = left - piece, taken + piece
        return {"type": "http.request", "body": b" " * piece, "more_body": left > 0}

    async def send(message: Any) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
            answered.update((k.decode(), v.decode()) for k, v in message["headers"])
        else:
            body += message["body"]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "server": ("api", 80),
        "client": ("client", 1),
        "state": {},
    }
    await app(scope, receive, send)
    return Answer(status, answered, body, taken)


@pytest.fixture
def with_app(shared_redis: Any) -> Callable[..., None]:
    """Run a check on an app that is asked without a server in between, limit 1 MiB."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[FastAPI]:
        settings = Settings(
            redis_url=shared_redis.url, admin_token=TOKEN, agent_token=AGENT_TOKEN, max_body_mib=1
        )
        store = RedisStore(settings.redis_url)
        app = create_app(settings, store)
        try:
            yield app
        finally:
            await app.state.streams.aclose()
            await app.state.transactions.aclose()
            await store.aclose()

    def run(check: Callable[[FastAPI], Any]) -> None:
        async def whole() -> None:
            async with opened() as app:
                await check(app)

        asyncio.run(whole())

    return run


def paths_of(app: FastAPI, job: str) -> Iterator[tuple[str, str, str]]:
    for method, route in routes_of(app):
        yield method, route, route.replace("{job}", job).replace("{fault}", "f")


@pytest.mark.parametrize("announced", [True, False])
def test_a_strangers_body_is_not_read_on_any_route(
    with_app: Callable[..., None], announced: bool
) -> None:
    async def check(app: FastAPI) -> None:
        for token in ("", "somebody-elses"):
            refused = 0
            for method, route, path in paths_of(app, "j"):
                reply = await ask(app, method, path, token, MIB, announced=announced)
                assert reply.taken == 0, (method, route)
                assert reply.ended_the_connection, (method, route)
                if route not in OPEN:
                    assert reply.status == 401, (method, route)
                    refused += 1
            assert refused >= 25

    with_app(check)


def test_a_body_that_says_that_it_is_too_long_is_refused_unread_on_every_route(
    with_app: Callable[..., None],
) -> None:
    async def check(app: FastAPI) -> None:
        for token in (TOKEN, ""):
            for method, _, path in paths_of(app, "j"):
                reply = await ask(app, method, path, token, MIB + 1, announced=True)
                assert reply.taken == 0
                assert reply.ended_the_connection
                if method != "HEAD":
                    reply.assert_names_the_limit()

    with_app(check)


def test_a_body_that_grows_too_long_is_read_up_to_the_limit_on_every_route(
    with_app: Callable[..., None],
) -> None:
    async def check(app: FastAPI) -> None:
        job = await create_job(app)
        too_long = 0
        for method, route, path in paths_of(app, job):
            if (method, route) == ("DELETE", "/v1/jobs/{job}"):
                continue
            reply = await ask(app, method, path, TOKEN, 8 * MIB, announced=False)
            # One piece more is what shows that it is too long.
            assert reply.taken <= 1.5 * MIB, (method, route)
            assert reply.ended_the_connection, (method, route)
            if reply.taken:
                too_long += 1
                if not route.endswith("/stream"):
                    reply.assert_names_the_limit()
        assert too_long >= 12

    with_app(check)


@pytest.mark.parametrize("announced", [True, False])
def test_who_sends_too_much_hears_so_from_a_real_server(
    new_api: Callable[..., Any], announced: bool
) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * (MIB // 2)

    content = b" " * 32 * MIB if announced else pieces()
    api = new_api(max_body_mib=1)
    reply = api.client.post("/v1/jobs", content=content)
    assert (reply.status_code, reply.json()["error"]) == (413, "body-too-large")
    assert api.client.get("/v1/jobs").status_code == 200


def test_a_stranger_who_never_ends_is_answered_and_cut_off(api: Any) -> None:
    where = httpx.URL(api.url)
    with socket.create_connection((where.host, where.port)) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: api\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n"
        )
        answer = b""
        while more := connection.recv(65_536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_what_cannot_be_understood_is_the_senders_mistake(job: Any) -> None:
    for content, kind in ((b"{", "application/json"), (b"{", "text/plain"), (b"[1]", "text/plain")):
        reply = job.api.client.post(
            f"{job.path}/agent/facts", content=content, headers={"Content-Type": kind}
        )
        assert reply.status_code == 422, (content, kind)


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_body_that_never_comes_whole_is_not_waited_for(method: str) -> None:
    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def read(scope: Any, receive: Any, send: Any) -> None:
        # A GET is a stream of events, which waits for its end only.
        assert await receive() == {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        del message

    headers = [(b"content-length", b"10")]
    scope = {"type": "http", "method": method, "headers": headers}
    limited = BodyLimitMiddleware(read, limit_mib=1, body_s=0.01)
    if method == "GET":
        asyncio.run(limited(scope, never, send))
        return
    with pytest.raises(HTTPException) as caught:
        asyncio.run(limited(scope, never, send))
    assert caught.value.status_code == 408


def test_requests_of_one_jobs_pods_wait_in_line_and_nobody_else_does(
    with_app: Callable[..., None],
) -> None:
    async def check(app: FastAPI) -> None:
        loud, quiet = await create_job(app), await create_job(app)

        async def plan_of(job: str) -> int:
            path = f"/v1/jobs/{job}/agent/plan"
            return (await ask(app, "GET", path, AGENT_TOKEN, 0, announced=True)).status

        async with AsyncExitStack() as held:
            asked = Asked(
                caller=Caller(username="a-pod"),
                job=loud,
                pod="pod-0",
                route="facts",
                by_agent=True,
                num_bytes=0,
                num_pods=0,
                connection=("", 0),
            )
            for _ in range(AT_ONCE_OF_JOB):
                await held.enter_async_context(app.state.lines.wait(asked, eager=False))
            waiting = asyncio.create_task(plan_of(loud))
            assert await plan_of(quiet) == 200
            seen = await ask(app, "GET", f"/v1/jobs/{loud}", TOKEN, 0, announced=True)
            assert seen.status == 200
            # What the job's pods ask makes none of them silent. The body is none, and is refused.
            beat = f"/v1/jobs/{loud}/agent/heartbeats"
            assert (await ask(app, "POST", beat, AGENT_TOKEN, 2, announced=True)).status == 422
            assert not waiting.done()
        assert await waiting == 200

    with_app(check)


def test_a_body_that_comes_slowly_takes_no_place_in_the_line(job: Any) -> None:
    job.register("pod-0")
    where = httpx.URL(job.api.url)
    begun = (
        f"POST {job.path}/agent/heartbeats HTTP/1.1\r\nHost: api\r\n"
        f"Authorization: Bearer {AGENT_TOKEN}\r\nContent-Length: 100\r\n\r\n{{"
    )
    with ExitStack() as slow:
        for _ in range(AT_ONCE_OF_JOB + 1):
            connection = socket.create_connection((where.host, where.port))
            slow.enter_context(connection).sendall(begun.encode())
        job.beat("pod-0")


async def create_job(app: FastAPI) -> Any:
    config = parse_training_job(MANIFEST).to_job_config(JobUid(secrets.token_hex(8)))
    await app.state.transactions.submit(config, MANIFEST)
    return config.job
