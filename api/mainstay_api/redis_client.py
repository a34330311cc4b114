"""Opens the client of Redis that a url describes: of one server, or of the one that Sentinels name.

With Sentinels a connection belongs to the server that was the master when it was opened. An old
master that still lives takes writes until a Sentinel makes it a replica, which may last ten
seconds, and these writes are lost. So Sentinels are asked again and again while connections are
used.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import redis.asyncio as redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from mainstay_core.base.errors import InvalidSpecError

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
SCHEMES = ("redis", "rediss", "unix", *SENTINEL_SCHEMES)
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 0.5
"""Of a question to one Sentinel, which answers from its memory. Those that do not answer are asked
one after the other, within the time of one call of the store."""
MASTER_AGE_S = 1.0
"""How old an answer of Sentinels may be when a connection is used. A second: as often as the api
looks at its jobs anyway."""
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLogin:
    """Passwords and certificates, ours and the servers'; all of them may be left out."""

    password: str = ""
    sentinel_password: str = ""
    ca_file: str = ""
    """Certificate of whoever signed the servers'; empty: those that the system trusts."""
    cert_file: str = ""
    """Our own certificate, for a server that asks for one."""
    key_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUrl:
    """A parsed url of Sentinels: whom to ask, and for which master."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    database: int
    username: str
    tls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLine:
    """The client of a store, and the clients of the Sentinels that name its server."""

    client: redis.Redis
    sentinels: tuple[redis.Redis, ...] = ()

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (self.client, *self.sentinels):
            await client.aclose()


class MasterPool(SentinelConnectionPool):
    """Connections to the master, which are closed soon after Sentinels name another one."""

    _asked_s = -math.inf

    async def get_connection(self, *args: Any, **kwargs: Any) -> AbstractConnection:
        """Return a connection to the server that is the master by what was heard last."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= MASTER_AGE_S:
            self._asked_s = now_s
            # Without Sentinels there is no failover: a master that serves is kept.
            with contextlib.suppress(MasterNotFoundError):
                await self.get_master_address()  # type: ignore[no-untyped-call]  # has no types
        taken = super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]  # either
        return cast("AbstractConnection", await taken)


def scheme_of(url: str) -> str:
    """Return the scheme of a url of Redis; empty if it is none of SCHEMES."""
    scheme, parted, _ = url.partition("://")
    return scheme if parted and scheme in SCHEMES else ""


def parse_sentinel_url(url: str) -> SentinelUrl:
    """Return the parts of ``redis+sentinel://[USER@]HOST[:PORT],.../MASTER[/DATABASE]``.

    ``rediss+sentinel`` asks for TLS, of the Sentinels and of the servers.

    Raises:
        InvalidSpecError: a part is missing or cannot be used.
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    username, _, hosts = authority.rpartition("@")
    master, _, database = path.partition("/")
    problem = ""
    if not master:
        problem = "names no master; add it: redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
    elif not hosts:
        problem = "names no Sentinel; add them: redis+sentinel://HOST:PORT,HOST:PORT/MASTER"
    elif ":" in username:
        problem = "holds a password; give it by MAINSTAY_REDIS_PASSWORD"
    elif database and not database.isdecimal():
        problem = f"has the database {database!r}, must be a number"
    if problem:
        # Without what stands before the @: a password may be there.
        raise InvalidSpecError("MAINSTAY_REDIS_URL", f"({scheme}://...{hosts}/{path}) {problem}")
    return SentinelUrl(
        hosts=tuple(_parse_host(host) for host in hosts.split(",")),
        master=unquote(master),
        database=int(database or 0),
        username=unquote(username),
        tls=scheme.startswith("rediss"),
    )


def _parse_host(text: str) -> tuple[str, int]:
    host, parted, port = text.rpartition(":")
    if not parted or text.endswith("]"):
        host, port = text, str(SENTINEL_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise InvalidSpecError(
            "MAINSTAY_REDIS_URL", f"has the Sentinel {text!r}, must be HOST or HOST:PORT"
        )
    return host, int(port)


def open_line(
    url: str, login: RedisLogin, timeout_s: float, on_connect: Callable[[AbstractConnection], Any]
) -> RedisLine:
    """Return the clients that a url describes; nothing is connected yet.

    Args:
        url: with a scheme of SCHEMES.
        login: what the url does not name.
        timeout_s: of one call, and of connecting.
        on_connect: called with each new connection to the store's server; it logs in.

    Raises:
        InvalidSpecError: the url cannot be used.
    """
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # A pooled connection may be one to a process that is gone: worth another one. A server
        # that is silent is not: whoever waits for us would wait several times as long.
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
        "redis_connect_func": on_connect,
    }
    if login.password:
        options["password"] = login.password
    scheme = scheme_of(url)
    if scheme not in SENTINEL_SCHEMES:
        # A certificate is for a server that asks for TLS; what the url names wins.
        options |= _certificates(login) if scheme == "rediss" else {}
        return RedisLine(client=redis.Redis.from_url(url, **options))
    told = parse_sentinel_url(url)
    tls: dict[str, Any] = {"ssl": True, **_certificates(login)} if told.tls else {}
    asking: dict[str, Any] = {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        # The next Sentinel is the second attempt.
        "retry": Retry(NoBackoff(), 0),
        **tls,
    }
    if login.sentinel_password:
        asking["password"] = login.sentinel_password
    if told.username:
        options["username"] = told.username
    group = Sentinel(told.hosts, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]  # same
    options |= {"db": told.database, **tls}
    client = group.master_for(told.master, connection_pool_class=MasterPool, **options)
    return RedisLine(client=client, sentinels=tuple(group.sentinels))


def _certificates(login: RedisLogin) -> dict[str, str]:
    files = {
        "ssl_ca_certs": login.ca_file,
        "ssl_certfile": login.cert_file,
        "ssl_keyfile": login.key_file,
    }
    return {name: path for name, path in files.items() if path}
