"""Tells the listeners of the api which connections were admitted, and ends those that were not.

A connection is admitted with the first of its requests whose token was found good, whatever the
answer. Until then it is a stranger's: the head of one request is read, in a few seconds, and its
answer is the last (:mod:`mainstay_net.http`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstay_net.http import HttpEntrance

ADMITTED = "mainstay.admitted"
"""Set in the scope of a request that was admitted, and whose connection may stay."""
_CLOSE = (b"connection", b"close")


class Connections:
    """The connections of the api, whichever listener they came through."""

    def __init__(self) -> None:
        self.entrances: list[HttpEntrance] = []
        """The listeners; empty where an app is called without a server."""

    def asked(self, scope: Scope) -> None:
        """A whole request has come."""
        for entrance in self.entrances:
            entrance.asked(_peer(scope))

    def admitted(self, scope: Scope) -> None:
        """A request's caller is known and may: its connection may stay."""
        scope[ADMITTED] = True
        self.served(scope)

    def served(self, scope: Scope) -> None:
        """A request's caller is known and may: the answer may take its time."""
        for entrance in self.entrances:
            entrance.admitted(_peer(scope))


class AdmissionMiddleware:
    """Ends connections with the answer to a request that was not admitted.

    Plain ASGI: it holds no stream of events up.

    Args:
        app: what is asked.
        connections: of the api.
    """

    def __init__(self, app: ASGIApp, connections: Connections) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._connections.asked(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and ADMITTED not in scope:
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        await self._app(scope, receive, answer)


def _peer(scope: Scope) -> tuple[str, int]:
    host, port = scope.get("client") or ("", 0)
    return host, port
