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
from mainstay_core.base import codec, proofs
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.supervisor.gossip import Given
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
        assert job_secret.is_proved(proofs.prove(SECRET, "heal", 1), "heal", 1)
        assert not job_secret.is_proved("", "heal", 1)
    finally:
        job_secret.read.cache_clear()


def gossip(secret: str, plans: list[Plan]) -> PlanGossip:
    return PlanGossip(lambda: None, plans.append, secret)


def told(message: bytes) -> Frame:
    (frame,) = FrameParser().feed(message)
    return frame


def test_a_plan_is_taken_from_pods_of_the_job_only() -> None:
    taken: list[Plan] = []
    asked = gossip(SECRET, taken)
    ours, theirs = gossip(SECRET, []), gossip("another job's", [])
    newest = codec.encode(plan(5))
    assert asked.answer(told(ours.pack(Given(plan(5))))) == {"kind": "thanks"}
    assert taken == [plan(5)]
    for message in (theirs.pack(Given(plan(5))), pack({"kind": "plan", "plan": newest})):
        with pytest.raises(RemoteProtocolError, match="no proof"):
            asked.answer(told(message))
    # A proof is one for what it was made for.
    frame = told(ours.pack(Given(plan(5))))
    frame.head["plan"] = codec.encode(plan(6))
    with pytest.raises(RemoteProtocolError, match="no proof"):
        asked.answer(frame)
    assert len(taken) == 1
