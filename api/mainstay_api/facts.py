"""Reads a fact in the body of a request, in the newest format or in an older one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.wire.facts import Fact, modernized_fact
from mainstay_core.wire.formats import UnknownFormatError


def _modernize(data: Any) -> Any:
    """Return a fact's JSON in the newest format; the framework answers a ValueError with 422.

    Raises:
        UnknownFormatError: it is newer than this api, which has an answer of its own for that.
    """
    try:
        return modernized_fact(data)
    except UnknownFormatError:
        raise
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from error


ToldFact = Annotated[Fact, Field(discriminator="kind"), BeforeValidator(_modernize)]
"""A fact in a body, whatever the version of who tells it."""
