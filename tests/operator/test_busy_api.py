"""An api that wants to be asked less is no api that is away."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from mainstay_core.pool.memory import PoolMemory
from mainstay_core.wire.api import ApiError, Failure
from mainstay_operator.api_client import ApiClient
from mainstay_operator.metrics import Metrics
from mainstay_operator.state import BUSY_S, ReconcilerState
from mainstay_operator.status import PodRecord


def known() -> ReconcilerState:
    """The state of a reconciler whose api has answered."""
    return ReconcilerState(record=PodRecord(), memory=PoolMemory(), api_problem="")


def test_the_operator_is_told_for_how_long_not_to_ask() -> None:
    async def refuse(request: web.Request) -> web.Response:
        del request
        return web.json_response({"detail": "too much"}, status=429, headers={"Retry-After": "7"})

    async def ask() -> ApiError:
        app = web.Application()
        app.router.add_route("*", "/{any:.*}", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with ApiClient(url, lambda: "token", Metrics()) as api:
                with pytest.raises(ApiError) as caught:
                    await api.fetch_pods("job")
            return caught.value
        finally:
            await runner.cleanup()

    error = asyncio.run(ask())
    assert (error.failure, error.retry_after_s) == (Failure.BUSY, 7.0)
    state = known()
    state.note_api_error(error, 100.0)
    assert state.ask_at_s == 107.0
    assert state.api_problem == "", "what the api said last holds, and so do the conditions"


def test_an_api_that_does_not_say_how_much_less_is_left_alone_for_a_moment() -> None:
    state = known()
    state.note_api_error(ApiError("slow", Failure.BUSY), 100.0)
    assert state.ask_at_s == 100.0 + BUSY_S


def test_an_api_that_is_away_is_one_all_the_same() -> None:
    state = known()
    state.note_api_error(ApiError("nobody there", Failure.UNREACHED), 100.0)
    assert (state.api_problem, state.ask_at_s) == ("nobody there", 0.0)
