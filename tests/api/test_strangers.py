"""Connections of callers whom the api has not admitted: few, short, and no hindrance to others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.api.conftest import TOKEN, Api

from mainstay_core.base.admission import Bounds

SMALL = Bounds(total=16, per_address=16, prove_s=0.3, answer_s=1.0)


@pytest.fixture
def api(shared_redis: Any) -> Iterator[Api]:
    made = Api(shared_redis.url, SMALL)
    yield made
    made.stop()


def call(api: Api) -> socket.socket:
    host, _, port = api.url.removeprefix("http://").rpartition(":")
    caller = socket.create_connection((host, int(port)))
    caller.settimeout(30)
    return caller


def ask(caller: socket.socket, path: str = "/v1/jobs", token: str = "", more: str = "") -> str:
    """Send a request and return the head of its answer, in lower case; empty if none comes."""
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n{shown}{more}\r\n"
    try:
        caller.sendall(request.encode())
        head = b""
        while b"\r\n\r\n" not in head:
            data = caller.recv(1)
            if not data:
                break
            head += data
    except ConnectionError:
        return ""
    return head.decode().lower()


def is_closed(caller: socket.socket) -> bool:
    """Wait until the connection ends."""
    try:
        while caller.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_who_says_nothing_is_closed(api: Api) -> None:
    with call(api) as caller:
        assert is_closed(caller)


def test_who_says_a_little_at_a_time_is_closed(api: Api) -> None:
    with call(api) as caller:
        caller.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n")
        assert is_closed(caller)


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/metrics", "/nothing"])
def test_the_answer_to_who_was_not_admitted_is_the_last(api: Api, path: str) -> None:
    with call(api) as caller:
        assert "connection: close" in ask(caller, path, token="wrong")
        assert is_closed(caller)


def test_who_was_admitted_stays_longer_than_strangers_do(api: Api) -> None:
    with call(api) as admitted, call(api) as stranger:
        assert " 200 " in ask(admitted, token=TOKEN)
        assert is_closed(stranger)
        # What is left of the first answer's body comes before the second answer.
        assert " 200 " in ask(admitted, token=TOKEN)


def test_a_head_without_an_end_is_not_read_for_long(api: Api) -> None:
    with call(api) as caller:
        caller.sendall(b"GET / HTTP/1.1\r\nX-Long: ")
        with pytest.raises(ConnectionError):
            caller.sendall(b"x" * (256 << 20))


def test_many_that_say_nothing_keep_nobody_out(api: Api) -> None:
    idle = [call(api) for _ in range(300)]
    with call(api) as caller:
        assert " 200 " in ask(caller, token=TOKEN)
    for each in idle:
        each.close()
