"""Reads facts and entries of the ledger in the body of a request.

Facts come in the newest format or in an older one. Digests must be such: the report adds them up.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from mainstay_core.base.digest import Digest
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.wire.facts import Fact, Finished, modernized_fact
from mainstay_core.wire.formats import UnknownFormatError
from mainstay_core.wire.ledger import LedgerEntry


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


def check_entry(entry: LedgerEntry) -> LedgerEntry:
    """Return an entry of the ledger whose digests are such.

    Raises:
        ValueError: one is not.
    """
    Digest.parse(entry.masters)
    began = entry.forked.masters if entry.forked is not None else ""
    for digest in filter(None, (entry.gradient, entry.data, began)):
        Digest.parse(digest)
    return entry


def check_final(fact: Fact) -> Fact:
    """Return a fact whose final digests, if it tells any, are such.

    Raises:
        ValueError: one is not.
    """
    if isinstance(fact, Finished) and fact.final is not None:
        final = fact.final
        for digest in (final.params, final.masters, final.optimizer, *filter(None, [final.data])):
            Digest.parse(digest)
    return fact


ToldFact = Annotated[
    Fact, Field(discriminator="kind"), BeforeValidator(_modernize), AfterValidator(check_final)
]
"""A fact in a body, whatever the version of who tells it."""
ToldEntry = Annotated[LedgerEntry, AfterValidator(check_entry)]
"""An entry of the ledger in a body."""
