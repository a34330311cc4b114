"""Errors quote what peers and users wrote: they can still be logged, stored and sent back."""

from __future__ import annotations

import pytest

from mainstay_core.base.bounds import MAX_SENTENCE, is_utf8
from mainstay_core.base.errors import (
    IntegrityError,
    InvalidSpecError,
    MalformedError,
    OwnershipError,
    RemoteProtocolError,
)

HOSTILE = "\ud800" + "x" * 1_000_000


@pytest.mark.parametrize("kind", [RemoteProtocolError, IntegrityError, OwnershipError])
def test_an_error_is_a_short_text_whatever_it_quotes(kind: type[Exception]) -> None:
    told = str(kind(HOSTILE))
    assert len(told) <= MAX_SENTENCE
    assert is_utf8(told)
    assert str(kind("as it is")) == "as it is"


@pytest.mark.parametrize("kind", [InvalidSpecError, MalformedError])
def test_so_are_the_parts_of_an_error_that_names_a_field(kind: type[Exception]) -> None:
    error = kind(HOSTILE, HOSTILE)
    problem = error.message if isinstance(error, InvalidSpecError) else error.problem
    for told in (str(error), error.field, problem):
        assert len(told) <= MAX_SENTENCE
        assert is_utf8(told)
    assert str(kind("spec.a", "is 3")) == "spec.a: is 3"
