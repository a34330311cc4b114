"""A store behind a password or TLS is reached with what the settings name, and nothing else."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import REDIS_IS_READY, find_redis, wait_for_line
from tests.worlds.tls import Certificates, TlsRelay

from mainstay_api.__main__ import open_store
from mainstay_api.redis_client import SentinelUrl, parse_sentinel_url
from mainstay_api.settings import Settings
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.control_plane.job_store import StoreUnavailableError

# A character that a url could not hold.
PASSWORD = "s3/cr@t:"


@pytest.fixture(scope="module")
def locked_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a Redis that wants a password; its configuration comes as the chart's does."""
    folder = tmp_path_factory.mktemp("locked")
    path = folder / "r.sock"
    config = f'port 0\nunixsocket {path}\nsave ""\nrequirepass "{PASSWORD}"\n'
    process = subprocess.Popen(
        [find_redis(), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
    )
    assert process.stdin is not None
    process.stdin.write(config.encode())
    process.stdin.close()
    wait_for_line(process.stdout, REDIS_IS_READY)
    yield path
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_redis(locked_redis: Path, certificates: Certificates) -> Iterator[str]:
    """The address of that Redis behind TLS, which asks for its callers' certificates as well.

    The server of the tests knows no TLS: a relay before it does.
    """
    relay = TlsRelay(certificates, locked_redis)
    yield relay.address
    relay.close()


def ping(url: str, password: str, **more: object) -> None:
    environment = {
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_REDIS_URL": url,
        "MAINSTAY_REDIS_PASSWORD": password,
        **{f"MAINSTAY_REDIS_{name.upper()}": str(value) for name, value in more.items()},
    }

    async def run() -> None:
        store = open_store(Settings.from_environment(environment))
        try:
            await store.ping()
        finally:
            await store.aclose()

    asyncio.run(run())


def test_the_password_opens_the_store(locked_redis: Path) -> None:
    ping(f"unix://{locked_redis}", PASSWORD)


@pytest.mark.parametrize("password", ["", "wrong"])
def test_without_the_password_the_store_is_unavailable(locked_redis: Path, password: str) -> None:
    with pytest.raises(StoreUnavailableError):
        ping(f"unix://{locked_redis}", password)


def test_a_store_with_tls_is_reached_with_the_certificates_that_are_named(
    tls_redis: str, certificates: Certificates
) -> None:
    own = {"cert_file": certificates.client, "key_file": certificates.client_key}
    ping(f"rediss://{tls_redis}/0", PASSWORD, ca_file=certificates.authority, **own)
    # The server's certificate is compared with who signed it, and with the address.
    for authority in (certificates.stranger, None):
        named = {"ca_file": authority} if authority else {}
        with pytest.raises(StoreUnavailableError, match="verify failed"):
            ping(f"rediss://{tls_redis}/0", PASSWORD, **named, **own)
    elsewhere = tls_redis.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreUnavailableError, match="ostname mismatch"):
        ping(f"rediss://{elsewhere}/0", PASSWORD, ca_file=certificates.authority, **own)
    # Without a certificate of our own, and without TLS, it does not serve us.
    with pytest.raises(StoreUnavailableError):
        ping(f"rediss://{tls_redis}/0", PASSWORD, ca_file=certificates.authority)
    with pytest.raises(StoreUnavailableError):
        ping(f"redis://{tls_redis}/0", PASSWORD)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        (
            "redis+sentinel://one:1,two/store",
            SentinelUrl(
                hosts=(("one", 1), ("two", 26379)),
                master="store",
                database=0,
                username="",
                tls=False,
            ),
        ),
        (
            "rediss+sentinel://some%40body@[::1]:7,[fe80::2]/store/3",
            SentinelUrl(
                hosts=(("::1", 7), ("fe80::2", 26379)),
                master="store",
                database=3,
                username="some@body",
                tls=True,
            ),
        ),
    ],
)
def test_a_url_of_sentinels_is_read(url: str, parsed: SentinelUrl) -> None:
    assert parse_sentinel_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://redis:6379", "must begin with one of redis://"),
        ("redis", "must begin with one of redis://"),
        ("redis+sentinel://one:1", "names no master"),
        ("redis+sentinel:///store", "names no Sentinel"),
        ("redis+sentinel://one:one/store", "has the Sentinel 'one:one'"),
        ("redis+sentinel://one:70000/store", "has the Sentinel 'one:70000'"),
        ("redis+sentinel://one,,two/store", "has the Sentinel ''"),
        ("redis+sentinel://one/store/first", "has the database 'first'"),
        ("redis+sentinel://me:word@one/store", "MAINSTAY_REDIS_PASSWORD"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_by_name(url: str, words: str) -> None:
    environment = {"MAINSTAY_TOKEN": "t", "MAINSTAY_REDIS_URL": url}
    with pytest.raises(InvalidSpecError, match="MAINSTAY_REDIS_URL") as refused:
        open_store(Settings.from_environment(environment))
    assert words in str(refused.value)
    assert "word@" not in str(refused.value)


def test_a_certificate_without_its_key_is_refused() -> None:
    environment = {
        "MAINSTAY_TOKEN": "t",
        "MAINSTAY_REDIS_URL": "rediss://redis",
        "MAINSTAY_REDIS_CERT_FILE": "tls.crt",
    }
    with pytest.raises(InvalidSpecError, match="MAINSTAY_REDIS_KEY_FILE"):
        Settings.from_environment(environment)
