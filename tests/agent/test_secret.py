"""Pods of one job prove to each other that they know its secret; nobody else is let in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.agent.test_supervisor import plan

from mainstay_agent.gather import GatherServer
from mainstay_agent.gossip import PlanGossip
from mainstay_core.base import codec
from mainstay_core.base.frames import pack
from mainstay_core.base.proofs import ANSWER_BYTES, HELLO_BYTES
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.wire.plan import Plan
from mainstay_train.base import job_secret
from mainstay_train.comm.gather_client import GatherClient

HOST = "127.0.0.1"
SECRET = "known to the job's pods"


@pytest.fixture
def address() -> Iterator[str]:
    """Of a gather server that asks for a proof."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = GatherServer(secret=SECRET)
    yield asyncio.run_coroutine_threadsafe(server.start(HOST), loop).result()
    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def join(address: str, index: int, secret: str, monkeypatch: pytest.MonkeyPatch) -> GatherClient:
    monkeypatch.setattr(job_secret, "read", lambda: secret)
    return GatherClient(address, "q1-a", index, 2, f"life-{index}", HOST)


@pytest.mark.parametrize("secret", ["", "another job's"])
def test_a_stranger_does_not_get_in_and_disturbs_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    member = join(address, 0, SECRET, monkeypatch)
    stranger = join(address, 1, secret, monkeypatch)
    with pytest.raises(QuorumAborted, match="no proof of the job's secret"):
        stranger.wait("key")
    other = join(address, 1, SECRET, monkeypatch)
    for index, each in enumerate((member, other)):
        each.post("key", b"%d" % index)
    assert member.wait("key") == other.wait("key") == [b"0", b"1"]
    for each in (member, stranger, other):
        each.close()


def test_the_secret_is_read_from_the_file_that_the_pod_was_given(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_secret.read.cache_clear()
    try:
        (tmp_path / "secret").write_text(f"{SECRET}\n")
        monkeypatch.setenv("MAINSTAY_SECRET_FILE", str(tmp_path / "secret"))
        assert job_secret.read() == SECRET
    finally:
        job_secret.read.cache_clear()


def offered(listener: str, speaker: str) -> list[Plan]:
    """Return what a supervisor takes that listens with one secret, offered with another one."""

    async def offer() -> list[Plan]:
        taken: list[Plan] = []
        server = GatherServer(answer=PlanGossip(lambda: None, taken.append).answer, secret=listener)
        address = await server.start(HOST)
        await PlanGossip(lambda: plan(5), taken.append, speaker).offer(address, plan(5))
        await server.close()
        return taken

    return asyncio.run(offer())


def test_a_plan_is_taken_from_pods_of_the_job_only() -> None:
    assert offered(SECRET, SECRET) == [plan(5)]
    assert offered(SECRET, "another job's") == []
    assert offered(SECRET, "") == []


def test_a_plan_is_offered_to_pods_of_the_job_only() -> None:
    """Who listens where a supervisor was is told nothing of the plan, and gives none."""

    async def offer() -> tuple[bytes, list[Plan]]:
        heard, taken = bytearray(), []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.extend(await reader.read(1000))
            writer.write(
                bytes(ANSWER_BYTES) + pack({"kind": "plan", "plan": codec.encode(plan(9))})
            )
            heard.extend(await reader.read())
            writer.close()

        async with await asyncio.start_server(serve, HOST, 0) as impostor:
            address = f"{HOST}:{impostor.sockets[0].getsockname()[1]}"
            await PlanGossip(lambda: plan(5), taken.append, SECRET).offer(address, plan(5))
        return bytes(heard), taken

    heard, taken = asyncio.run(offer())
    assert len(heard) == HELLO_BYTES
    assert taken == []
