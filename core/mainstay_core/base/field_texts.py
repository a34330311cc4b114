"""Makes the JSON of a large value of which little has changed since the last time.

A job's state has entries for every pod and slot, and a decision changes few of them. Frozen values
never change, so what is the same object as before has the same text.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mainstay_core.base import codec

_Item = tuple[Any, str]
"""A value and its text. The value is held, so that no other one gets its identity."""


class FieldTexts:
    """Writes values of one dataclass as :func:`codec.dumps` does, and remembers the last one.

    All that the values hold must never be changed in place.
    """

    def __init__(self) -> None:
        self._fields: dict[str, _Item] = {}
        self._items: dict[str, dict[int, _Item]] = {}
        """By field that is a tuple: its items, by identity."""

    def dumps(self, value: Any) -> str:
        """Return the canonical JSON of a dataclass, as :func:`codec.dumps` does."""
        texts = []
        for field in sorted(dataclasses.fields(value), key=lambda field: field.name):
            part = getattr(value, field.name)
            if field.metadata == codec.OMITTED and not codec.encode(part):
                continue
            texts.append(f"{json.dumps(field.name)}:{self._text_of(field.name, part)}")
        return "{" + ",".join(texts) + "}"

    def _text_of(self, name: str, part: Any) -> str:
        known = self._fields.get(name)
        if known is not None and known[0] is part:
            return known[1]
        text = self._join(name, part) if type(part) is tuple else codec.dumps(part)
        self._fields[name] = (part, text)
        return text

    def _join(self, name: str, items: tuple[Any, ...]) -> str:
        known = self._items.get(name, {})
        written = {id(item): known.get(id(item)) or (item, codec.dumps(item)) for item in items}
        self._items[name] = written
        return "[" + ",".join(written[id(item)][1] for item in items) + "]"
