"""Reads the bodies that supervisors send most, without the framework.

In a recovery each pod of a job sends some, all at once, and to look up a request's parts one by one
takes the framework longer than the decision about them. A body that cannot be read here goes the
framework's way, whose answer says what is wrong with it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from mainstay_api.bodies import LONG_BYTES
from mainstay_core.base.errors import RemoteProtocolError

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectBody:
    """The argument of an endpoint that is its request's body."""

    name: str
    read: Callable[[Any], Any]
    """Returns the argument from the JSON value. It raises RemoteProtocolError, or ValueError, for
    whatever the framework would refuse, or read otherwise."""
    others: frozenset[str]
    """Names of the endpoint's other arguments."""


_BODIES: dict[Callable[..., Any], DirectBody] = {}


def read_directly(name: str, read: Callable[[Any], Any]) -> Callable[[EndpointT], EndpointT]:
    """Have an endpoint's body read by ``read``, where that can read it.

    Args:
        name: of the argument.
        read: see :class:`DirectBody`.
    """

    def note(endpoint: EndpointT) -> EndpointT:
        others = frozenset(inspect.signature(endpoint).parameters) - {name}
        _BODIES[endpoint] = DirectBody(name=name, read=read, others=others)
        return endpoint

    return note


def direct_body_of(endpoint: Callable[..., Any]) -> DirectBody | None:
    """Return how an endpoint's body is read here; None if it is not."""
    return _BODIES.get(endpoint)


async def read_body(request: Request, body: DirectBody) -> Mapping[str, Any] | None:
    """Return the endpoint's argument that is the body, by its name; None: the framework reads it.

    Args:
        request: whose body has come.
        body: of the endpoint.
    """
    if request.headers.get("content-type") != "application/json":
        return None
    content = await request.body()
    if len(content) > LONG_BYTES:
        return None
    try:
        return {body.name: body.read(json.loads(content))}
    except (RemoteProtocolError, ValueError, RecursionError):
        return None
