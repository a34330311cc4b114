"""What an elector reads and writes, at a server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.operator.test_kube import POD, Answer, with_server

from mainstay_core.wire.api import ApiError
from mainstay_operator.api_client import ApiClient
from mainstay_operator.elector import Elector, LeadershipLostError, await_turn, run_as_leader
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.leadership import LeaseTiming
from mainstay_operator.metrics import Metrics

TIMING = LeaseTiming(duration_s=60.0, renew_s=30.0, retry_s=0.01)
MISSING: Answer = (404, {"reason": "NotFound", "message": "there is none"})
REFUSED: Answer = (403, {"reason": "Forbidden", "message": "you may not"})
CONFLICT: Answer = (409, {"reason": "Conflict", "message": "there is another version"})


def lease(holder: str, version: str = "1") -> Answer:
    """A Lease that somebody holds; '': that was given back."""
    spec = {"holderIdentity": holder, "leaseTransitions": 3, "acquireTime": "then"}
    spec["leaseDurationSeconds"] = 60 if holder else 1
    metadata = {"namespace": "n", "name": "operator", "resourceVersion": version}
    return (200, {"kind": "Lease", "metadata": metadata, "spec": spec})


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has an elector acquire the Lease and do more; returns what came of it, and the bodies."""

    def run(answers: list[Answer], *more: str) -> tuple[Elector, list[Any], list[Any]]:
        metrics = Metrics()

        async def act(kube: KubeClient) -> tuple[Elector, list[Any]]:
            elector = Elector(kube, ("n", "operator"), "me", TIMING, metrics)
            await elector.acquire()
            assert (elector.forbid(), metrics.leader._value.get()) == ("", 1)
            told = [await getattr(elector, name)() for name in more]
            assert not answers
            return elector, told

        (elector, told), bodies = with_server(tmp_path, monkeypatch, answers, act)
        return elector, told, bodies

    return run


def test_a_lease_is_made_where_there_is_none_or_taken_over_its_version(play: Any) -> None:
    _, _, bodies = play([MISSING, lease("me")])
    assert bodies[1]["spec"]["holderIdentity"] == "me"
    assert "resourceVersion" not in bodies[1]["metadata"]

    # Somebody else was faster, and gave it back again; rights may come later than the pod.
    _, _, bodies = play([REFUSED, lease(""), CONFLICT, lease("", "2"), lease("me", "3")])
    assert [b["metadata"]["resourceVersion"] for b in bodies if b] == ["1", "2"]
    assert bodies[-1]["spec"]["leaseTransitions"] == 4

    # It is there, and empty: as the chart makes it, or as somebody left it.
    for spec in ({}, {"spec": None}, {"spec": {"holderIdentity": ""}}):
        emptied = {"metadata": {"namespace": "n", "name": "operator", "resourceVersion": "1"}}
        _, _, bodies = play([(200, {**emptied, **spec}), lease("me", "2")])
        assert bodies[-1]["metadata"]["resourceVersion"] == "1"


def test_who_has_lost_the_lease_acts_no_more(play: Any) -> None:
    elector, told, _ = play([MISSING, lease("me"), CONFLICT, lease("other", "2")], "hold")
    assert told == ["the Lease was taken away: other has it"]
    assert elector.forbid() == told[0]

    elector, told, bodies = play([MISSING, lease("me"), MISSING], "hold", "release")
    assert told[0] == elector.forbid() == "the Lease was deleted or emptied"
    assert len(bodies) == 3, "what it does not have it does not give back, nor make anew"


def test_who_stood_still_while_its_claim_was_answered_ends_and_comes_again(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = LeaseTiming(duration_s=60.0, renew_s=1e-9, retry_s=0.01)
    monkeypatch.setattr("tests.operator.test_elector.TIMING", at_once)
    with pytest.raises(LeadershipLostError, match="could not be renewed"):
        play([MISSING, lease("me"), lease("me", "2")])


def test_a_lease_is_given_back_over_its_version(play: Any) -> None:
    elector, _, bodies = play([MISSING, lease("me"), lease("me", "7"), lease("", "8")], "release")
    assert bodies[-1]["metadata"]["resourceVersion"] == "7"
    spec = bodies[-1]["spec"]
    assert ("holderIdentity" in spec, spec["leaseDurationSeconds"]) == (False, 1)
    assert elector.forbid() == "the Lease is given back"


def test_who_does_not_lead_reads_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(_: KubeClient) -> dict[str, Any] | None:
        shut = KubeClient(
            qps=1000, burst=1000, timeout_s=9, metrics=Metrics(), forbid=lambda: "it waits"
        )
        async with shut as kube:
            with pytest.raises(KubeError, match="not sent: it waits"):
                await kube.create(POD)
            with pytest.raises(KubeError, match="not sent: it waits"):
                await kube.delete("pods", "n", "demo-0", "u")
            return await kube.fetch("pods", "n", "demo-0")

    found, bodies = with_server(tmp_path, monkeypatch, [(200, POD)], act)
    assert (found, len(bodies)) == (POD, 1)


def test_who_does_not_lead_changes_nothing_at_the_api() -> None:
    async def act() -> None:
        url = "http://127.0.0.1:1"  # nobody answers, and nobody is asked
        async with ApiClient(url, lambda: "token", Metrics(), lambda: "it waits") as api:
            with pytest.raises(ApiError, match="not sent: it waits"):
                await api.stop_job("u")
            with pytest.raises(ApiError, match="not reached"):
                await api.fetch_pods("u")

    asyncio.run(act())


class Play(Elector):
    """An elector whose turn comes, and ends, when the test says so."""

    def __init__(self) -> None:
        kube = KubeClient(qps=1, burst=1, timeout_s=1, metrics=Metrics())
        super().__init__(kube, ("n", "operator"), "me", TIMING, Metrics())
        self.turn, self.lost = asyncio.Event(), asyncio.Event()
        self.released = False

    async def acquire(self) -> None:
        await self.turn.wait()

    async def hold(self) -> str:
        await self.lost.wait()
        return "other has it"

    async def release(self) -> None:
        self.released = True


def test_who_waits_may_be_told_to_end() -> None:
    async def run() -> tuple[bool, bool]:
        elector, ended = Play(), asyncio.Event()
        asyncio.get_running_loop().call_soon(ended.set)
        return await await_turn(elector, ended), elector.released

    assert asyncio.run(run()) == (False, True)


def test_whose_turn_it_is_works_until_it_is_done_or_the_lease_is_lost() -> None:
    ended = []

    async def work(until: asyncio.Event) -> None:
        try:
            await until.wait()
        finally:
            ended.append(until.is_set())

    async def run(elector: Play, work: Coroutine[Any, Any, None]) -> None:
        elector.turn.set()
        assert await await_turn(elector, asyncio.Event())
        await run_as_leader(elector, work)

    async def in_order() -> Play:
        elector, done = Play(), asyncio.Event()
        done.set()
        await run(elector, work(done))
        return elector

    async def lost() -> None:
        elector = Play()
        elector.lost.set()
        await run(elector, work(asyncio.Event()))

    assert asyncio.run(in_order()).released
    with pytest.raises(LeadershipLostError, match="other has it"):
        asyncio.run(lost())
    assert ended == [True, False]
