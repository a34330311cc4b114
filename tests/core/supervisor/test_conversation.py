"""The conversation of a pod with an api that is played: what it says again, and what it drops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mainstay_core.base.ids import JobUid, PodUid, QuorumId
from mainstay_core.base.shape import JobShape
from mainstay_core.job.config import JobConfig
from mainstay_core.supervisor.conversation import ApiPort, Conversation, PodPort
from mainstay_core.wire.api import (
    ApiRefused,
    ApiUnavailable,
    Failure,
    HeartbeatReply,
    Registration,
)
from mainstay_core.wire.facts import Fact, Heartbeat, Leaving

SHAPE = JobShape(
    lanes=1,
    shards_per_lane=1,
    replicas=1,
    min_replicas=1,
    stages=1,
    micro_batches=1,
    steps=1,
    seed=0,
)
FACT = Leaving(pod=PodUid("pod-0"), evidence="SIGTERM")


class PlayedApi:
    """An api whose answers to facts are given beforehand; time does not pass."""

    def __init__(self, answers: Sequence[Exception | None]) -> None:
        self.answers = list(answers)
        self.told: list[tuple[Fact, ...]] = []
        self.said: list[tuple[str, str]] = []
        self.slept: list[float] = []

    async def post_facts(self, facts: tuple[Fact, ...]) -> None:
        self.told.append(facts)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        await asyncio.sleep(0)

    def flag(self) -> asyncio.Event:
        return asyncio.Event()

    def lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    def say(self, level: str, text: str) -> None:
        self.said.append((level, text))


class PlayedPod:
    """A pod that takes whatever the conversation feeds it."""

    def feed(self, event: Any) -> None:
        """Nothing follows from it here."""


def tell(answers: Sequence[Exception | None]) -> PlayedApi:
    """Tell one fact to an api with these answers, until nothing waits any more."""
    api = PlayedApi(answers)

    async def run() -> None:
        conversation = Conversation(cast(ApiPort, api), cast(PodPort, PlayedPod()))
        telling = asyncio.create_task(conversation.tell_facts())
        conversation.tell(FACT)
        await conversation.wait_told()
        telling.cancel()
        await asyncio.wait([telling])

    asyncio.run(run())
    return api


def test_a_fact_that_an_older_api_does_not_understand_is_told_until_it_is_up_to_date() -> None:
    too_new = ApiRefused(422, "unknown-format", "Fact comes in format 3, known here are 1 to 2")

    api = tell([too_new, too_new, None])

    assert api.told == [(FACT,)] * 3
    assert [level for level, _ in api.said] == ["error"]
    assert "Fact comes in format 3" in api.said[0][1]


@pytest.mark.parametrize(
    ("answer", "times", "level"),
    [
        (ApiUnavailable("nobody there"), 2, "warning"),
        (ApiUnavailable("too many", Failure.BUSY, 3.0), 2, "warning"),
        (ApiRefused(403, "forbidden", "another account"), 2, "error"),
        (ApiRefused(422, "malformed", "no such slot"), 1, "info"),
    ],
)
def test_a_fact_is_told_again_where_the_api_is_away_and_dropped_where_it_is_refused(
    answer: Exception, times: int, level: str
) -> None:
    api = tell([answer, None])

    assert len(api.told) == times
    assert [said for said, _ in api.said] == [level]


def test_who_is_asked_to_ask_less_waits_as_long_and_says_so() -> None:
    busy = ApiUnavailable("429: too many requests", Failure.BUSY, 3.0)
    api = tell([busy, ApiUnavailable("nobody there"), None])

    assert api.slept[0] == 3.0
    assert api.slept[1] < 1.0, "that wait was for once"
    assert [said for said in api.said if "asks for fewer requests" in said[1]] == api.said


class PlayedBeats(PlayedApi):
    """An api that answers heartbeats, and the time that passes between them."""

    async def post_heartbeat(self, heartbeat: Any) -> Any:
        del heartbeat
        raise self.answers.pop(0) or AssertionError

    def now_s(self) -> float:
        return sum(self.slept)


@pytest.mark.parametrize(("failure", "num_offers"), [(Failure.BUSY, 0), (Failure.UNREACHED, 1)])
def test_an_api_that_is_busy_is_not_taken_for_one_that_is_away(
    failure: Failure, num_offers: int
) -> None:
    api = PlayedBeats([ApiUnavailable("x", failure, 3.0), asyncio.CancelledError()])  # type: ignore[list-item]
    offers = []

    class Pod(PlayedPod):
        def heartbeat(self) -> Heartbeat:
            return Heartbeat(pod=PodUid("pod-0"), slots=())

        def offer(self) -> None:
            offers.append(1)

    async def run() -> None:
        beating = Conversation(cast(ApiPort, api), cast(PodPort, Pod())).beat(1.0)
        with pytest.raises(asyncio.CancelledError):
            await beating

    asyncio.run(run())
    assert len(offers) == num_offers
    assert api.slept == [3.0]


class Named(PlayedApi):
    """An api whose heartbeats name a plan; it can be fetched, and a stream may stand."""

    def __init__(self, num_beats: int) -> None:
        super().__init__([None] * num_beats)
        self.num_beats, self.fetched, self.ends = num_beats, [], asyncio.Event()

    async def register(self, registration: Any) -> Registration:
        del registration
        config = JobConfig(job=JobUid("job"), name="job", shape=SHAPE, entrypoint="", workload={})
        return Registration(config=config, manifest={}, plan=None, cursor="", restored_at_s=0.0)

    async def post_heartbeat(self, heartbeat: Any) -> HeartbeatReply:
        del heartbeat
        if self.num_beats == 0:
            raise asyncio.CancelledError
        self.num_beats -= 1
        return HeartbeatReply(quorum=QuorumId(id=5, nonce="x"))

    async def fetch_plan(self) -> None:
        self.fetched.append(self.num_beats)

    async def follow(self, cursor: str, opened: Any, take: Any) -> None:
        del cursor, take
        opened()
        await self.ends.wait()
        raise ApiUnavailable("it broke")

    def now_s(self) -> float:
        return sum(self.slept)


class Listening(PlayedPod):
    """A pod that holds no plan, and counts the ends of the stream."""

    def __init__(self) -> None:
        self.num_ends = 0

    def registration(self) -> None:
        """It introduces itself with nothing."""

    def welcomed(self, answer: Any) -> None:
        """It takes up nothing."""

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(pod=PodUid("pod-0"), slots=())

    def stream_ended(self) -> None:
        self.num_ends += 1


@pytest.mark.parametrize(("stands", "fetched"), [(True, [0]), (False, [1, 0])])
def test_a_plan_that_a_heartbeat_names_is_fetched_unless_the_stream_may_still_bring_it(
    stands: bool, fetched: list[int]
) -> None:
    api = Named(num_beats=2)

    async def run() -> None:
        conversation = Conversation(cast(ApiPort, api), cast(PodPort, Listening()))
        await conversation.register()
        conversation.stands = stands
        with pytest.raises(asyncio.CancelledError):
            await conversation.beat(1.0)

    asyncio.run(run())
    assert api.fetched == fetched


class Streams(Named):
    """An api whose first stream ends, after it stood or before; the second one goes on."""

    def __init__(self, *, stands: bool) -> None:
        super().__init__(num_beats=0)
        self.stands, self.num_streams, self.second = stands, 0, asyncio.Event()

    async def follow(self, cursor: str, opened: Any, take: Any) -> None:
        self.num_streams += 1
        if self.num_streams > 1:
            self.second.set()
            await asyncio.Event().wait()
        if self.stands:
            await super().follow(cursor, opened, take)
        raise ApiUnavailable("nobody there")


@pytest.mark.parametrize(("stands", "num_ends"), [(True, 1), (False, 0)])
def test_the_end_of_a_stream_that_stood_is_told_to_the_pod_once(
    stands: bool, num_ends: int
) -> None:
    api, pod = Streams(stands=stands), Listening()

    async def run() -> None:
        conversation = Conversation(cast(ApiPort, api), cast(PodPort, pod))
        following = asyncio.create_task(conversation.follow_stream())
        while stands and not conversation.stands:
            await asyncio.sleep(0)
        assert pod.num_ends == 0
        api.ends.set()
        await api.second.wait()
        following.cancel()
        await asyncio.wait([following])

    asyncio.run(run())
    assert pod.num_ends == num_ends
