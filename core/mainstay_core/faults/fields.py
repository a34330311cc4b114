"""Reads fields of a faults file; a mistake is named by its path, with what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from mainstay_core.base.bounds import is_utf8
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote

MAX_NUMBER = 1e10
"""Bound on durations and factors, as messages have it."""
MAX_ID_CHARS = 512
"""Bound on the id of a fault, as messages have it."""


def fields(data: object, path: str, valid: Sequence[str]) -> Mapping[str, object]:
    """Return a mapping with no other fields than ``valid``.

    Raises:
        InvalidSpecError: it is none, or has another field.
    """
    if not isinstance(data, Mapping):
        raise InvalidSpecError(
            path, f"expected fields ({', '.join(valid)}), found {type(data).__name__}"
        )
    for key in data:
        if key not in valid:
            close = difflib.get_close_matches(str(key), valid, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InvalidSpecError(
                f"{path}.{key}", f"unknown field; {hint}valid here: {', '.join(valid)}"
            )
    return data


def choice(value: object, path: str, valid: Sequence[str], of_what: str = "") -> str:
    """Return a value that is one of ``valid``.

    Raises:
        InvalidSpecError: it is none of them.
    """
    if isinstance(value, str) and value in valid:
        return value
    close = difflib.get_close_matches(quote(value), valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    whose = f", for {of_what}" if of_what else ""
    raise InvalidSpecError(
        path, f"is {quote(value)}, must be one of {', '.join(valid)}{whose}{hint}"
    )


def integer(value: object, path: str, end: int, of_what: str, *, start: int = 0) -> int:
    """Return a whole number in ``start``..``end`` - 1.

    Raises:
        InvalidSpecError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not start <= value < end:
        raise InvalidSpecError(
            path,
            f"is {quote(value)}, must be a whole number from {start} to {end - 1}, as {of_what}",
        )
    return value


def number(value: object, path: str, least: float, unit: str, *, above: bool = False) -> float:
    """Return a number from ``least``, or above it, to ``MAX_NUMBER``.

    Raises:
        InvalidSpecError: it is none.
    """
    wanted = f"must be {unit}, " + (f"more than {least:g}" if above else f"{least:g} or more")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSpecError(path, f"is {quote(value)}, {wanted}")
    if not least <= value <= MAX_NUMBER or (above and value == least):
        raise InvalidSpecError(path, f"is {quote(value)}, {wanted}, at most {MAX_NUMBER:g}")
    return float(value)


def text(value: object, path: str, which: str) -> str:
    """Return a text that is not empty, nor longer than ``MAX_ID_CHARS``.

    Raises:
        InvalidSpecError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise InvalidSpecError(path, f"is {quote(value)}, must be a text {which}")
    if len(value) > MAX_ID_CHARS or not is_utf8(value):
        raise InvalidSpecError(
            path, f"is {quote(value)}, must be UTF-8 of at most {MAX_ID_CHARS} characters"
        )
    return value
