"""The conversation of a pod with an api that is played: what it says again, and what it drops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from mainstay_core.base.ids import PodUid
from mainstay_core.supervisor.conversation import ApiPort, Conversation, PodPort
from mainstay_core.wire.api import ApiRefused, ApiUnavailable
from mainstay_core.wire.facts import Fact, Leaving

FACT = Leaving(pod=PodUid("pod-0"), evidence="SIGTERM")


class PlayedApi:
    """An api whose answers to facts are given beforehand; time does not pass."""

    def __init__(self, answers: Sequence[Exception | None]) -> None:
        self.answers = list(answers)
        self.told: list[tuple[Fact, ...]] = []
        self.said: list[tuple[str, str]] = []

    async def post_facts(self, facts: tuple[Fact, ...]) -> None:
        self.told.append(facts)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer

    async def sleep(self, delay_s: float) -> None:
        del delay_s
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
        (ApiRefused(422, "malformed", "no such slot"), 1, "info"),
    ],
)
def test_a_fact_is_told_again_where_the_api_is_away_and_dropped_where_it_is_refused(
    answer: Exception, times: int, level: str
) -> None:
    api = tell([answer, None])

    assert len(api.told) == times
    assert [said for said, _ in api.said] == [level]
