"""A store behind a password, or behind TLS, is reached with what the settings name."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import REDIS_IS_READY, find_redis, wait_for_line

from mainstay_api.__main__ import open_store
from mainstay_api.settings import Settings
from mainstay_core.coordinator.job_store import StoreUnavailableError

# A character that a url could not hold.
PASSWORD = "s3/cr@t:"


@pytest.fixture
def locked_redis(tmp_path: Path) -> Iterator[str]:
    """The url of a Redis that wants a password; its configuration comes as the chart's does."""
    path = tmp_path / "r.sock"
    config = f'port 0\nunixsocket {path}\nsave ""\nrequirepass "{PASSWORD}"\n'
    process = subprocess.Popen(
        [find_redis(), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    wait_for_line(process.stdout, REDIS_IS_READY)
    yield f"unix://{path}"
    process.kill()
    process.wait()


def ping(url: str, password: str) -> None:
    environment = {
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_REDIS_URL": url,
        "MAINSTAY_REDIS_PASSWORD": password,
    }

    async def run() -> None:
        store = open_store(Settings.from_environment(environment))
        try:
            await store.ping()
        finally:
            await store.aclose()

    asyncio.run(run())


def test_the_password_opens_the_store(locked_redis: str) -> None:
    ping(locked_redis, PASSWORD)


@pytest.mark.parametrize("password", ["", "wrong"])
def test_without_the_password_the_store_is_unavailable(locked_redis: str, password: str) -> None:
    with pytest.raises(StoreUnavailableError):
        ping(locked_redis, password)


def test_tls_is_checked_against_the_certificate_that_is_named() -> None:
    environment = {
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_REDIS_URL": "rediss://mainstay@redis.example.com:6380/0",
        "MAINSTAY_REDIS_PASSWORD": PASSWORD,
        "MAINSTAY_REDIS_CA_FILE": "/etc/mainstay/redis/ca.crt",
    }
    store = open_store(Settings.from_environment(environment))
    told = store._redis.connection_pool.connection_kwargs
    assert (told["username"], told["password"]) == ("mainstay", PASSWORD)
    assert told["ssl_ca_certs"] == "/etc/mainstay/redis/ca.crt"
    assert told.get("ssl_cert_reqs", "required") == "required"
