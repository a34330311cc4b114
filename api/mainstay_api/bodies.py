"""Bounds the body of a request, and reads none of it before a route asks for it.

Plain ASGI, as :mod:`mainstay_api.metrics`: it holds no stream of events up. A body that says
how long it is and is too long is refused before anything looks at it; one that does not say is
counted while it is read. Of a body that was not read to its end the rest stays where it is: the
connection ends with the answer, or the server would go on taking what nobody wants.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIB = 1 << 20
_CLOSE = (b"connection", b"close")


class BodyTooLargeError(HTTPException):
    """A body is longer than the api reads.

    It is of the framework's kind of errors, which the framework passes on as they are.
    """

    def __init__(self, limit_mib: int) -> None:
        self.limit_mib = limit_mib
        super().__init__(413, f"the body is longer than {limit_mib} MiB, the limit of this api")

    def answer(self) -> JSONResponse:
        """Return the answer, in the form of all errors."""
        todo = "send less at once, or raise MAINSTAY_MAX_BODY_MIB (value api.maxBodyMiB) of the api"
        body = {
            "error": "body-too-large",
            "detail": self.detail,
            "what_to_do": todo,
            "limit_bytes": self.limit_mib * MIB,
        }
        return JSONResponse(body, status_code=self.status_code)


class BodyLimitMiddleware:
    """Bounds the bodies of all requests.

    Args:
        app: what is asked.
        limit_mib: of one body.
    """

    def __init__(self, app: ASGIApp, limit_mib: int) -> None:
        self._app = app
        self._limit_mib = limit_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = headers.get("content-length", "0")
        announced = int(told) if told.isdecimal() else 0
        limit = self._limit_mib * MIB
        taken, is_whole = 0, announced == 0 and "transfer-encoding" not in headers

        async def take() -> Message:
            nonlocal taken, is_whole
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if taken > limit:
                    is_whole = False
                    if scope["method"] == "GET":
                        # No route reads such a body: it is a stream that waits for its end.
                        return {"type": "http.disconnect"}
                    raise BodyTooLargeError(self._limit_mib)
            return message

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_whole:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        if announced > limit:
            await BodyTooLargeError(self._limit_mib).answer()(scope, take, answer)
        else:
            await self._app(scope, take, answer)
