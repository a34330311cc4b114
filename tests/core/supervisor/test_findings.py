"""Findings of a pod's trainers: numbered, bounded, and told until the api has heard of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from tests.core.dmr.test_flips import FOUND
from tests.core.supervisor.test_conversation import PlayedApi, PlayedPod

from mainstay_core.base.ids import Incarnation
from mainstay_core.supervisor.conversation import ApiPort, Conversation, PodPort
from mainstay_core.supervisor.findings import FindingOutbox
from mainstay_core.wire.api import ApiRefused, ApiUnavailable
from mainstay_core.wire.findings import MAX_BATCH, MAX_WAITING, ToldFinding

FIRST, SECOND = Incarnation("life-1"), Incarnation("life-2")


def put(outbox: FindingOutbox, number: int, life: Incarnation = FIRST) -> FindingOutbox:
    for _ in range(number):
        outbox = outbox.put(FOUND, life, at_s=1.0)
    return outbox


def test_each_life_of_a_trainer_counts_its_findings_from_0() -> None:
    outbox = put(put(FindingOutbox(), 2), 1, SECOND)

    assert [(t.incarnation, t.number) for t in outbox.waiting] == [
        (FIRST, 0),
        (FIRST, 1),
        (SECOND, 0),
    ]


def test_more_than_may_wait_are_counted_by_one_that_waits() -> None:
    """So they are told also if the trainer finds nothing more in its life."""
    outbox = put(FindingOutbox(), MAX_WAITING + 3)
    assert len(outbox.waiting) == MAX_WAITING
    newest = outbox.waiting[-1]
    assert (newest.number, newest.untold) == (MAX_WAITING - 1, 3)
    assert outbox.held == outbox.waiting

    other = put(outbox, 1, SECOND)
    assert other.waiting[-1].untold == 4, "of another life that has told none"

    outbox, batch = outbox.take()
    assert len(batch) == MAX_BATCH
    later = put(outbox, 1)
    assert (later.waiting[-1].number, later.waiting[-1].untold) == (MAX_WAITING + 3, 0)
    while later.waiting:
        later, batch = later.take()
    assert sum(told.untold for told in later.repeat().waiting) == 3


def test_the_newest_of_the_same_trainer_counts() -> None:
    outbox = put(put(FindingOutbox(), 2), MAX_WAITING - 2, SECOND)
    outbox = put(outbox, 5, SECOND)

    assert [told.untold for told in outbox.waiting if told.untold] == [5]
    assert outbox.waiting[-1].untold == 5


def test_an_api_that_has_lost_them_is_told_the_newest_again() -> None:
    outbox = put(FindingOutbox(), 2)
    while outbox.waiting:
        outbox, _ = outbox.take()
    assert outbox.repeat().waiting == outbox.held
    assert len(outbox.held) == 2


class HearingApi(PlayedApi):
    """An api whose answers to findings are given beforehand."""

    def __init__(self, answers: Sequence[Exception | None]) -> None:
        super().__init__(answers)
        self.heard: list[tuple[ToldFinding, ...]] = []

    async def post_findings(self, findings: tuple[ToldFinding, ...]) -> None:
        self.heard.append(findings)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


def run(answers: Sequence[Exception | None], number: int) -> HearingApi:
    """Find so many, and wait until all is told."""
    api = HearingApi(answers)

    async def main() -> None:
        talk = Conversation(cast(ApiPort, api), cast(PodPort, PlayedPod()))
        for _ in range(number):
            talk.find(FOUND, FIRST, 1.0)
        telling = asyncio.ensure_future(talk.mirror_findings())
        await talk.wait_told()
        telling.cancel()

    asyncio.run(main())
    return api


def test_findings_are_told_in_batches_and_again_while_the_api_is_away() -> None:
    api = run([ApiUnavailable("away"), None, None], MAX_BATCH + 1)
    assert [len(batch) for batch in api.heard] == [MAX_BATCH, MAX_BATCH, 1]
    assert api.heard[0] == api.heard[1]


def test_findings_that_the_api_refuses_are_dropped_and_it_is_said() -> None:
    api = run([ApiRefused(409, "conflict", "of no step of the job")], 2)
    assert len(api.heard) == 1
    assert any("2 findings refused" in text for _, text in api.said)


def test_a_finding_says_what_it_was_in_one_sentence() -> None:
    assert FOUND.describe("demo-0/1") == (
        "step 4 of r1.s0.i0 on demo-0/1: two executions of aten.mm (#4) in the weight pass of "
        "layers.3 differ in 1 element; the third execution equals the checker; it was repaired "
        "before anybody read it"
    )
    plain = replace(FOUND, rank=None, block=None, output=1, num_elements=5)
    assert plain.describe() == (
        "step 4 of pod-a/1: two executions of aten.mm (#4) in the weight pass differ in 5 elements "
        "of output 1; the third execution equals the checker; it was repaired before anybody read "
        "it"
    )
