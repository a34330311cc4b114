"""Lines of pods' requests: one that is one of many waits for others, and they never for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mainstay_api import lines
from mainstay_api.auth import Caller
from mainstay_api.limits import AT_ONCE_OF_JOB, PODS_OF_EAGER, Asked
from mainstay_api.lines import Lines


def a_request(route: str = "facts", num_pods: int = 0, job: str = "job") -> Asked:
    return Asked(
        caller=Caller(username="a-pod"),
        job=job,
        pod="pod-0",
        route=route,
        by_agent=True,
        num_bytes=0,
        num_pods=num_pods,
        connection=("", 0),
    )


class Played:
    """Requests that wait in lines, and stay until the gate opens."""

    def __init__(self) -> None:
        self.lines, self.gate = Lines(), asyncio.Event()
        self.inside: list[Asked] = []

    async def ask(self, asked: Asked, *, eager: bool) -> None:
        async with self.lines.wait(asked, eager=eager):
            self.inside.append(asked)
            await self.gate.wait()

    def start(self, asked: Asked, *, eager: bool) -> asyncio.Task[None]:
        return asyncio.create_task(self.ask(asked, eager=eager))


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def played(drive: Callable[[Played], Awaitable[None]]) -> None:
    async def run() -> None:
        await drive(Played())

    asyncio.run(run())


def test_eager_pods_have_one_place_and_more_in_a_large_job() -> None:
    async def drive(play: Played) -> None:
        asking = []
        for num_pods, inside in ((0, 1), (PODS_OF_EAGER, 3)):
            asked = a_request(num_pods=num_pods, job=f"of {num_pods}")
            asking += [play.start(asked, eager=True) for _ in range(10)]
            await turns()
            assert len(play.inside) == inside
        play.gate.set()
        await asyncio.gather(*asking)
        assert len(play.inside) == 20

    played(drive)


def test_usual_requests_have_their_places_and_heartbeats_theirs() -> None:
    async def drive(play: Played) -> None:
        waiting = [play.start(a_request(), eager=False) for _ in range(AT_ONCE_OF_JOB + 2)]
        beats = [play.start(a_request("heartbeats"), eager=False) for _ in range(2)]
        await turns()
        assert [asked.route for asked in play.inside].count("facts") == AT_ONCE_OF_JOB
        assert [asked.route for asked in play.inside].count("heartbeats") == 2
        play.gate.set()
        await asyncio.gather(*waiting, *beats)

    played(drive)


def test_an_eager_request_waits_while_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "GIVE_WAY_S", 600.0)

    async def drive(play: Played) -> None:
        with play.lines.ahead():
            eager = play.start(a_request(), eager=True)
            usual = play.start(a_request(job="other"), eager=False)
            await turns()
            assert [asked.job for asked in play.inside] == ["other"]
        await turns()
        assert len(play.inside) == 1, "the other job's is still there"
        play.gate.set()
        await asyncio.gather(eager, usual)
        assert [asked.job for asked in play.inside] == ["other", "job"]

    played(drive)


def test_an_eager_request_does_not_wait_for_ever() -> None:
    async def drive(play: Played) -> None:
        play.gate.set()
        with play.lines.ahead():
            async with asyncio.timeout(100 * lines.GIVE_WAY_S):
                await play.ask(a_request(), eager=True)
        assert len(play.inside) == 1

    played(drive)


def test_a_place_of_eager_pods_rests_longer_than_it_was_used() -> None:
    async def drive() -> None:
        now_s, rests, rested = 100.0, list[float](), asyncio.Event()

        async def rest(seconds: float) -> None:
            rests.append(seconds)
            await rested.wait()

        queue = Lines(lambda: now_s, rest)
        inside = list[int]()

        async def ask(number: int) -> None:
            nonlocal now_s
            async with queue.wait(a_request(), eager=True):
                inside.append(number)
                now_s += 0.01 if number else 10.0

        asking = [asyncio.create_task(ask(number)) for number in range(2)]
        await turns()
        assert (inside, rests) == ([0], [lines.MAX_REST_S])
        async with queue.wait(a_request(job="other"), eager=False):
            pass  # nobody else waits for that
        async with queue.wait(a_request("heartbeats"), eager=True):
            pass  # nor does any pod become silent by it
        rested.set()
        await asyncio.gather(*asking)
        assert inside == [0, 1]
        assert rests[1] == pytest.approx(0.01 * lines.RESTS)

    asyncio.run(drive())
