"""Errors as people and agents see them: what is wrong, and what to do about it.

One form for all: ``{"error": code, "detail": sentence, "what_to_do": sentence}``;
a 409 about a quorum carries the current plan as well.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mainstay_api.bodies import BodyTooLargeError
from mainstay_api.plan_texts import PlanTexts
from mainstay_api.store_protocol import DeletedJobError
from mainstay_core.base.bounds import cut
from mainstay_core.base.errors import (
    MAX_FIELD_CHARS,
    InvalidSpecError,
    RemoteProtocolError,
    StoreConflictError,
)
from mainstay_core.control_plane.answers import StaleFactsError
from mainstay_core.control_plane.job_store import StoreUnavailableError, UnknownJobError
from mainstay_core.control_plane.problems import PROBLEMS
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.intake.store_recovery import StoreBehindError
from mainstay_core.wire.formats import UnknownFormatError

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 20
"""Problems of one body that an answer names. There may be one for each of 65,536 nodes."""


class ProblemError(Exception):
    """A request that cannot be served, with the answer.

    Args:
        status: HTTP status.
        error: code for machines, kebab-case.
        detail: what is wrong, one sentence.
        what_to_do: how to go on, one sentence.
        extra: further fields of the body; ``retry_after_s``, a whole number, is the header
            ``Retry-After`` as well.
    """

    def __init__(
        self,
        status: int,
        error: str,
        detail: str,
        what_to_do: str,
        **extra: object,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.body: dict[str, object] = {
            "error": error,
            # It may quote the request.
            "detail": cut(detail),
            "what_to_do": what_to_do,
            **extra,
        }


def unknown_job(job: str) -> ProblemError:
    """Return the answer to a job that does not exist."""
    return ProblemError(
        *PROBLEMS[UnknownJobError],
        f"there is no job {job!r}",
        "list the jobs with GET /v1/jobs; a job is named by its uid or its name",
    )


def install(app: FastAPI) -> None:
    """Translate the exceptions of core, store and framework at this boundary."""
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(InvalidSpecError, _invalid)
    app.add_exception_handler(UnregisteredPodError, _unregistered)
    app.add_exception_handler(StaleFactsError, _stale)
    app.add_exception_handler(StoreBehindError, _behind)
    app.add_exception_handler(UnknownFormatError, _unknown_format)
    app.add_exception_handler(RemoteProtocolError, _conflict)
    app.add_exception_handler(StoreConflictError, _busy)
    app.add_exception_handler(StoreUnavailableError, _unavailable)
    app.add_exception_handler(DeletedJobError, _deleted)
    app.add_exception_handler(UnknownJobError, _vanished)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(BodyTooLargeError, _too_large)
    app.add_exception_handler(HTTPException, _http)


def _answer(status: int, error: str, detail: str, what_to_do: str, **extra: Any) -> JSONResponse:
    body = {"error": error, "detail": cut(detail), "what_to_do": what_to_do, **extra}
    return JSONResponse(body, status_code=status)


async def _problem(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, ProblemError)
    wait_s = error.body.get("retry_after_s")
    headers = None if wait_s is None else {"Retry-After": str(wait_s)}
    return JSONResponse(error.body, status_code=error.status, headers=headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, InvalidSpecError)
    return _answer(
        *PROBLEMS[InvalidSpecError], str(error), f"correct {error.field}", field=error.field
    )


async def _unregistered(request: Request, error: Exception) -> JSONResponse:
    job = request.path_params.get("job", "{job}")
    todo = f"POST /v1/jobs/{job}/agent/pods, then tell all its trainers again"
    return _answer(*PROBLEMS[UnregisteredPodError], str(error), todo)


async def _stale(request: Request, error: Exception) -> Response:
    """The current plan goes with the answer, if the caller lacks it."""
    assert isinstance(error, StaleFactsError)
    newest = "adopt the plan in this reply" if error.plan else "go on in the plan that you hold"
    todo = f"{newest}; tell only what concerns its quorum"
    status, name = PROBLEMS[StaleFactsError]
    texts: PlanTexts = request.app.state.plan_texts
    body = {"error": name, "detail": cut(str(error)), "what_to_do": todo}
    return texts.answer(error.plan, body, status)


async def _behind(request: Request, error: Exception) -> JSONResponse:
    job = request.path_params.get("job", "{job}")
    todo = f"POST /v1/jobs/{job}/agent/restore with the plan that you hold, then register"
    return _answer(*PROBLEMS[StoreBehindError], str(error), todo)


async def _conflict(request: Request, error: Exception) -> JSONResponse:
    del request
    return _answer(
        *PROBLEMS[RemoteProtocolError], str(error), "read the job again; it has moved on"
    )


async def _unknown_format(request: Request, error: Exception) -> JSONResponse:
    del request
    logger.error("a message is newer than this api: %s", error)
    todo = "update the api, then tell this again"
    return _answer(*PROBLEMS[UnknownFormatError], str(error), todo)


async def _busy(request: Request, error: Exception) -> JSONResponse:
    del request
    return _answer(
        *PROBLEMS[StoreConflictError], str(error), "ask again: others decided first every time"
    )


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    del request
    logger.warning("the store is not reached: %s", error)
    todo = "ask again: training goes on meanwhile, and nothing was decided"
    return _answer(*PROBLEMS[StoreUnavailableError], str(error), todo)


async def _vanished(request: Request, error: Exception) -> JSONResponse:
    del error
    return await _problem(request, unknown_job(str(request.path_params.get("job", ""))))


async def _deleted(request: Request, error: Exception) -> JSONResponse:
    del request
    todo = "end what still runs of it; a new job gets a uid of its own"
    return _answer(410, "job-deleted", str(error), todo)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    problems = [
        {
            "field": cut(".".join(str(part) for part in e["loc"]), MAX_FIELD_CHARS),
            # It may quote the value.
            "message": cut(e["msg"], MAX_FIELD_CHARS),
        }
        for e in errors[:MAX_PROBLEMS]
    ]
    detail = "; ".join(f"{p['field']}: {p['message']}" for p in problems)
    if len(errors) > MAX_PROBLEMS:
        detail += f"; and {len(errors) - MAX_PROBLEMS} more"
    todo = "correct these fields; /openapi.json has the schema and examples"
    return _answer(422, "malformed", detail, todo, problems=jsonable_encoder(problems))


async def _too_large(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, BodyTooLargeError)
    return error.answer()


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return _answer(error.status_code, "http", detail, "see /docs for what there is")
