"""A store whose server is named by Sentinels goes on after a failover, at the new master."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tests.api.conftest import find_redis, wait_for_line

from mainstay_api.__main__ import open_store
from mainstay_api.settings import Settings
from mainstay_api.store import RedisStore
from mainstay_core.base.ids import JobUid

MASTER = "store"
PASSWORD = "of the servers"
ASKING = "of the sentinels"
UID = JobUid("a-job")
HOST = "127.0.0.1"
GIVE_UP_S = 60
POLL_S = 0.05


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextlib.contextmanager
def server(folder: Path, name: str, ready: bytes, lines: list[str], *args: str) -> Iterator[None]:
    """A redis-server, from when it has said that it is ready."""
    (folder / name).mkdir()
    config = folder / name / "redis.conf"
    config.write_text("\n".join([f"bind {HOST}", f"dir {folder / name}", *lines, ""]))
    process = subprocess.Popen([find_redis(), str(config), *args], stdout=subprocess.PIPE)
    try:
        wait_for_line(process.stdout, ready)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[int, int, int]]:
    """The ports of a master, of its replica, and of a Sentinel that watches them."""
    master, replica, watcher = free_ports(3)
    both = ['save ""', f"requirepass {PASSWORD!r}", f"masterauth {PASSWORD!r}"]
    of_watcher = [
        f"port {watcher}",
        f"requirepass {ASKING!r}",
        f"sentinel monitor {MASTER} {HOST} {master} 1",
        f"sentinel auth-pass {MASTER} {PASSWORD!r}",
    ]
    of_replica = [f"port {replica}", f"replicaof {HOST} {master}", *both]
    synced, seen = b"finished with success", b"+slave slave"
    with (
        server(tmp_path, "master", b"ready to accept", [f"port {master}", *both]),
        server(tmp_path, "replica", synced, of_replica),
        server(tmp_path, "watcher", seen, of_watcher, "--sentinel"),
    ):
        yield master, replica, watcher


def fail_over(watcher: int) -> None:
    """Have the Sentinel make the replica the master; return when it says so."""
    client = redis.Redis(HOST, watcher, password=ASKING, decode_responses=True)
    told = client.pubsub(ignore_subscribe_messages=True)
    told.subscribe("+switch-master")
    assert told.get_message(timeout=GIVE_UP_S) is None  # the subscription's own
    while True:
        try:
            client.execute_command("SENTINEL", "FAILOVER", MASTER)
            break
        except redis.ResponseError as error:
            # Until it has asked the replica how it is.
            if "NOGOODSLAVE" not in str(error):
                raise
            time.sleep(POLL_S)
    assert told.get_message(timeout=GIVE_UP_S) is not None
    told.close()
    client.close()


def test_a_failover_leads_the_store_to_the_new_master(watched: tuple[int, int, int]) -> None:
    _, replica, watcher = watched
    (dead,) = free_ports(1)
    environment = {
        "MAINSTAY_TOKEN": "t",
        # Nobody listens at the first one.
        "MAINSTAY_REDIS_URL": f"redis+sentinel://{HOST}:{dead},{HOST}:{watcher}/{MASTER}/0",
        "MAINSTAY_REDIS_PASSWORD": PASSWORD,
        "MAINSTAY_REDIS_SENTINEL_PASSWORD": ASKING,
    }

    async def run(store: RedisStore) -> None:
        await store.put_manifest(UID, {"written": "before"})
        first = await store._identify()
        await asyncio.to_thread(fail_over, watcher)
        # The old master lives on, and its connections do. A new one is another process: it may
        # have missed what the old one had confirmed.
        while await store._identify() == first:
            await store.ping()
        assert await store.fetch_manifest(UID) == {"written": "before"}
        await store.put_manifest(UID, {"written": "after"})
        await store.aclose()

    asyncio.run(run(open_store(Settings.from_environment(environment))))
    with redis.Redis(HOST, replica, password=PASSWORD) as client:
        assert client.info("replication")["role"] == "master"
        assert client.hget(f"mainstay:{{{UID}}}:job", "manifest") == b'{"written": "after"}'
