"""Inputs that are a line with a name, and JSON below it: what most targets take."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.fuzz.mutation import change_bytes, change_json, smaller_bytes, smaller_json, write_json

from mainstay_core.base.bounds import MAX_SENTENCE, is_utf8


class NamedTexts:
    """Inputs of several readers, made from valid ones.

    Args:
        valid: JSON values that the reader of that name accepts.
    """

    def __init__(self, valid: Mapping[str, Sequence[Any]]) -> None:
        self._texts = [(name, json.dumps(v)) for name, values in valid.items() for v in values]
        self._values = [json.loads(text) for _, text in self._texts]

    def examples(self) -> list[bytes]:
        """Return the valid inputs."""
        return [join(name, text.encode()) for name, text in self._texts]

    def make(self, draw: random.Random) -> bytes:
        """Return an input: mostly a valid one with a changed value, now and then changed bytes."""
        name, text = draw.choice(self._texts)
        if draw.random() < 0.1:
            return join(name, change_bytes(text.encode(), draw))
        _, changed = change_json(json.loads(text), draw, self._values)
        if draw.random() < 0.05:
            changed = change_bytes(changed, draw)
        return join(name, changed)

    def smaller(self, data: bytes) -> Iterator[bytes]:
        """Yield smaller inputs that may show the same."""
        name, text = split(data)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            yield from (join(name, less) for less in smaller_bytes(text))
        else:
            yield from (join(name, write_json(less)) for less in smaller_json(value))


def join(name: str, text: bytes) -> bytes:
    """Return an input."""
    return name.encode() + b"\n" + text


def split(data: bytes) -> tuple[str, bytes]:
    """Return name and text of an input."""
    name, _, text = data.partition(b"\n")
    return name.decode(errors="replace"), text


def check_error(error: Exception, *, shown: bool = False) -> None:
    """Check that an error about an input can be logged and sent back.

    Args:
        error: the documented one.
        shown: whether a terminal shows it as it is.

    Raises:
        AssertionError: it is too long, or is no text.
    """
    told = str(error)
    assert told.isprintable() or not shown, "a terminal cannot show the error"
    assert is_utf8(told), "the error cannot be written as UTF-8"
    assert len(told) <= MAX_SENTENCE, f"the error has {len(told)} characters"
