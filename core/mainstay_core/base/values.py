"""Makes changed copies of frozen values, in a fourth of the time that the standard library takes.

A state machine copies its whole state a few times for each event. The standard library calls the
constructor for that, with all fields by name. Here a function copies them from slot to slot; it is
written once for each class, as the standard library writes constructors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The type checker knows this one by name: it compares what changes with the fields.
    from dataclasses import replace as replace
else:

    def replace(value, /, **changes):
        """Return a copy of a value with some fields changed, as ``dataclasses.replace`` does."""
        kind = type(value)
        copier = _copier_of(kind)
        if copier is None:
            return dataclasses.replace(value, **changes)
        copy_of, writers, check = copier
        copy = copy_of(value)
        for name, field in changes.items():
            if name not in writers:
                raise TypeError(f"{kind.__name__} has no field {name!r}")
            writers[name](copy, field)
        if check is not None:
            check(copy)
        return copy


_Copier = tuple[Callable[[Any], Any], Mapping[str, Callable[[Any, Any], None]], Any]
"""What copies a value, what writes each field of the copy, and what checks it, if anything does."""


@cache
def _copier_of(kind: type) -> _Copier | None:
    """Return how values of a class are copied; None unless its fields are slots that it takes."""
    fields = dataclasses.fields(kind)
    slots = {field.name: getattr(kind, field.name, None) for field in fields if field.init}
    if len(slots) < len(fields):
        return None
    if not all(isinstance(slot, MemberDescriptorType) for slot in slots.values()):
        return None
    writers = {name: slot.__set__ for name, slot in slots.items() if slot is not None}
    lines = [f"    write_{name}(copy, value.{name})" for name in writers]
    source = ["def copy_of(value):", "    copy = new(kind)", *lines, "    return copy"]
    scope: dict[str, Any] = {f"write_{name}": write for name, write in writers.items()}
    scope |= {"new": object.__new__, "kind": kind}
    exec("\n".join(source), scope)
    return scope["copy_of"], writers, getattr(kind, "__post_init__", None)
