"""Fields of a faults file: each is taken, or refused by its path with what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

from mainstay_core.base.errors import InvalidSpecError


def fields(data: object, path: str, valid: Sequence[str]) -> Mapping[str, object]:
    """Return a mapping that has no other fields than ``valid``.

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
    """Return one of ``valid``.

    Raises:
        InvalidSpecError: it is none of them.
    """
    if isinstance(value, str) and value in valid:
        return value
    close = difflib.get_close_matches(str(value), valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    whose = f", for {of_what}" if of_what else ""
    raise InvalidSpecError(path, f"is {value!r}, must be one of {', '.join(valid)}{whose}{hint}")


def integer(value: object, path: str, end: int, of_what: str, *, start: int = 0) -> int:
    """Return a whole number from ``start`` up to, without, ``end``.

    Raises:
        InvalidSpecError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not start <= value < end:
        raise InvalidSpecError(
            path, f"is {value!r}, must be a whole number from {start} to {end - 1}, as {of_what}"
        )
    return value


def number(value: object, path: str, least: float, unit: str, *, above: bool = False) -> float:
    """Return a finite number that is at least ``least``, or above it.

    Raises:
        InvalidSpecError: it is none.
    """
    wanted = f"must be {unit}, " + (f"more than {least:g}" if above else f"{least:g} or more")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidSpecError(path, f"is {value!r}, {wanted}")
    if value < least or (above and value == least):
        raise InvalidSpecError(path, f"is {value!r}, {wanted}")
    return float(value)


def text(value: object, path: str, which: str) -> str:
    """Return a text that is not empty.

    Raises:
        InvalidSpecError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise InvalidSpecError(path, f"is {value!r}, must be a text {which}")
    return value
