"""Facts as tests tell them, by kind."""

from __future__ import annotations

import typing
from typing import Any

from mainstay_core.wire.facts import Fact, FactKind

_CLASSES: dict[FactKind, type[Any]] = {
    kind.__dataclass_fields__["kind"].default: kind for kind in typing.get_args(Fact)
}


def make_fact(kind: FactKind, **fields: Any) -> Any:
    """A fact of a kind; a field that is None is left out, and what it must say has a default."""
    given = {name: value for name, value in fields.items() if value is not None}
    if kind is FactKind.CHECKPOINT:
        given.setdefault("complete", not given.get("evidence"))
    return _CLASSES[kind](**given)
