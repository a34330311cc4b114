"""What a failed request to the api means, and what its answer says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.core.plans import make_plan

from mainstay_core.base.codec import encode
from mainstay_core.wire.api import (
    ApiError,
    ApiRefused,
    ApiUnavailable,
    Failure,
    failure_of,
    is_no_answer,
    read_retry_after,
)
from mainstay_core.wire.routes import JobApi, Request, explain, read_failure, read_object

ANSWERS = {401, 403, 404, 409, 410, 413, 422}
BUSY = {408, 429}
AWAY = {503}
BROKEN = {302, 500, 502}
ALL = ANSWERS | BUSY | AWAY | BROKEN


def failed(status: int) -> ApiError:
    return ApiError("it failed", failure_of(status))


def test_an_answer_is_one_that_somebody_gave_on_purpose() -> None:
    seen = {status for status in ALL if failed(status).is_answer}

    assert seen == ANSWERS
    assert not ApiError("nobody there", Failure.UNREACHED).is_answer


def test_an_api_is_away_when_it_is_not_reached_or_its_store_is_not() -> None:
    seen = {status for status in ALL if failed(status).is_away}

    assert seen == AWAY
    assert ApiError("nobody there", Failure.UNREACHED).is_away


def test_an_api_that_wants_to_be_asked_less_is_neither_away_nor_has_it_answered() -> None:
    assert {status for status in ALL if failed(status).is_busy} == BUSY


@pytest.mark.parametrize(
    ("said", "waits_s"),
    [
        (None, 0.0),
        ("2", 2.0),
        ("0", 0.0),
        ("86400", 30.0),
        ("9" * 5000, 30.0),
        ("-1", 0.0),
        ("1.5", 0.0),
        ("\u0663", 0.0),
        ("Sun, 22 Nov 2026 14:46:00 GMT", 0.0),
    ],
)
def test_a_wait_that_an_answer_asks_for_is_a_number_of_seconds_and_bounded(
    said: str | None, waits_s: float
) -> None:
    assert read_retry_after(said) == waits_s
    failure = read_failure(429, b"{}", said)
    assert isinstance(failure, ApiUnavailable)
    assert (failure.is_busy, failure.retry_after_s) == (True, waits_s)


def test_a_request_is_not_repeated_that_is_wrong_or_late() -> None:
    assert {status for status in ANSWERS if failed(status).is_final} == {409, 410, 413, 422}
    assert failed(404).failure is Failure.UNKNOWN


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"detail": "no such pod", "what_to_do": "name another"}, "no such pod; name another"),
        ({"detail": "no such pod"}, "no such pod"),
        ({"message": "x"}, "{'message': 'x'}"),
    ],
)
def test_an_explanation_says_what_is_wrong_and_what_to_do(body: object, said: str) -> None:
    assert explain(json.dumps(body).encode()) == said


def test_a_page_of_somebody_else_is_cut() -> None:
    assert explain(b"<html>" + b"x" * 100, 10) == "<html>xxxx"


class Answering(JobApi):
    """An api that answers everything with one value."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def send(self, request: Request) -> Any:
        del request
        return self.answer


def test_an_answer_that_cannot_be_read_is_no_outage_and_no_refusal() -> None:
    newer = Answering({"state": "dreaming", "num_pods": 3, "leaving": [], "ending": []})

    with pytest.raises(ApiError, match=r"PodsPage\.state: 'dreaming'") as caught:
        asyncio.run(newer.fetch_pods("demo"))

    assert caught.value.failure is Failure.NOT_UNDERSTOOD
    assert not caught.value.is_away
    assert not caught.value.is_answer
    assert not caught.value.is_final


def refused(status: int, **body: object) -> ApiRefused:
    failure = read_failure(status, json.dumps(body).encode())
    assert isinstance(failure, ApiRefused)
    return failure


def test_a_supervisor_registers_again_where_the_api_does_not_know_it() -> None:
    assert refused(404, error="unknown-job").is_unknown
    assert refused(409, error="unregistered").is_unknown
    assert not refused(409, error="stale").is_unknown
    assert refused(410, error="job-deleted").is_deleted


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_supervisor_asks_again_where_there_was_no_answer(status: int) -> None:
    assert isinstance(read_failure(status, b"<html>"), ApiUnavailable)


def test_which_status_settles_nothing_is_one_rule() -> None:
    assert {s for s in ALL if is_no_answer(s)} == {429, 500, 502, 503}


def test_a_refusal_carries_the_plan_in_force() -> None:
    plan = make_plan({0: ["a", "b"]})

    assert refused(409, error="stale", plan=encode(plan)).plan == plan
    assert refused(409, detail={"plan": encode(plan)}).plan == plan
    assert refused(409, error="stale", plan={"members": "none"}).plan is None


def test_an_answer_that_is_no_object_is_a_detail() -> None:
    assert read_object(b"") == {}
    assert read_object(b'{"plan": null}') == {"plan": None}
    assert read_object(b"[1]") == {"detail": [1]}
    assert read_object(b"<html>") == {"detail": "<html>"}
