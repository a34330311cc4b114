"""The api's client when this process has no descriptor left, and httpx fails in its own ways."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from mainstay_cli.base.client import ApiClient
from mainstay_core.wire.api import ApiError, Failure


def use_up_descriptors(client: ApiClient, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let every request fail, in its cancellation or once the returned event is set."""
    go = asyncio.Event()

    async def request(*_: Any, **__: Any) -> None:
        try:
            await go.wait()
        finally:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(client._http, "request", request)
    return go


def test_without_descriptors_the_api_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with ApiClient("http://127.0.0.1:1", "token") as client:
            use_up_descriptors(client, monkeypatch).set()
            assert not await client.is_ready()
            with pytest.raises(ApiError, match=r"not reached: .*Too many open files") as caught:
                await client.fetch("job")
            assert caught.value.failure is Failure.UNREACHED

    asyncio.run(story())


def test_a_request_that_fails_in_its_cancellation_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with ApiClient("http://127.0.0.1:1", "token") as client:
            use_up_descriptors(client, monkeypatch)
            asking = asyncio.create_task(client.is_ready())
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()

    asyncio.run(story())
