"""Bounds the body of a request, and reads none of it before a route asks for it.

Plain ASGI, as :mod:`mainstay_api.metrics`: it holds no stream of events up. A body that says
how long it is and is too long is refused before anything looks at it; one that does not say is
counted while it is read, and may be 1 MiB long at most. Of a body that was not read to its end the
rest stays where it is: the connection ends with the answer, or the server would go on taking what
nobody wants.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIB = 1 << 20
UNANNOUNCED_MIB = 1
"""Longest body that does not say how long it is. Our clients always say: only what is known
beforehand can be counted beforehand."""
BODY_S = 20.0
"""A body that has not come whole after so long is read no further: the longest one in a request of
a supervisor comes at 4 MiB per second then. Its connection costs a descriptor."""
LONG_BYTES = 64 * 1024
"""A longer body is parsed beside the event loop: it takes more than a millisecond."""
RAISE_LIMIT = "send less at once, or raise MAINSTAY_MAX_BODY_MIB (value api.maxBodyMiB) of the api"
_CLOSE = (b"connection", b"close")


class BodyTooLargeError(HTTPException):
    """A body is longer than the api reads.

    It is of the framework's kind of errors, which the framework passes on as they are.

    Args:
        limit_mib: longest body that is read.
        what_to_do: how to go on.
    """

    def __init__(self, limit_mib: int, what_to_do: str = RAISE_LIMIT) -> None:
        self.limit_mib, self.what_to_do = limit_mib, what_to_do
        super().__init__(413, f"the body is longer than {limit_mib} MiB, the limit of this api")

    def answer(self) -> JSONResponse:
        """Return the answer, in the form of all errors."""
        body = {
            "error": "body-too-large",
            "detail": self.detail,
            "what_to_do": self.what_to_do,
            "limit_bytes": self.limit_mib * MIB,
        }
        return JSONResponse(body, status_code=self.status_code)


class BodyLimitMiddleware:
    """Bounds the bodies of all requests.

    Args:
        app: what is asked.
        limit_mib: of one body.
        body_s: of its way here.
    """

    def __init__(self, app: ASGIApp, limit_mib: int, body_s: float = BODY_S) -> None:
        self._app = app
        self._limit_mib, self._body_s = limit_mib, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        announced = length_of(headers)
        unannounced = "transfer-encoding" in headers
        limit_mib = min(self._limit_mib, UNANNOUNCED_MIB) if unannounced else self._limit_mib
        limit = limit_mib * MIB
        taken, is_whole = 0, announced == 0

        late_at_s = asyncio.get_running_loop().time() + self._body_s

        async def take() -> Message:
            nonlocal taken, is_whole
            if is_whole:
                return await receive()  # which waits for the end of the connection
            try:
                async with asyncio.timeout_at(late_at_s):
                    message = await receive()
            except TimeoutError:
                if scope["method"] == "GET":
                    return {"type": "http.disconnect"}
                detail = f"the body has not come whole in {self._body_s:.0f} s"
                raise HTTPException(408, detail) from None
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if taken > limit:
                    is_whole = False
                    if scope["method"] == "GET":
                        # No route reads such a body: it is a stream that waits for its end.
                        return {"type": "http.disconnect"}
                    raise BodyTooLargeError(limit_mib)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        if announced > limit:
            await BodyTooLargeError(limit_mib).answer()(scope, take, answer)
        else:
            await self._app(scope, take, answer)


def length_of(headers: Headers) -> int:
    """Return how many bytes a body has, or may have if it does not say."""
    if "transfer-encoding" in headers:
        return UNANNOUNCED_MIB * MIB
    told = headers.get("content-length", "0")
    # No more digits than any limit has: thousands of them are no number to Python.
    return int(told[:18]) if told.isascii() and told.isdecimal() else 0


class LongRequest(Request):
    """A request whose body, if it is long, is parsed beside the event loop."""

    parse: Callable[[bytes], Any] = staticmethod(json.loads)
    _long: Any = None

    async def json(self) -> Any:
        """Return the value of the body; it is parsed once."""
        body = await self.body()
        if len(body) <= LONG_BYTES:
            return await super().json()
        if self._long is None:
            self._long = await asyncio.to_thread(self.parse, body)
        return self._long
