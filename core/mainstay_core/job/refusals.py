"""Explains what is wrong with a TrainingJob: names the field, and says what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mainstay_core.base.bounds import MAX_DEPTH
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.words import quote

Loc = tuple[int | str, ...]
"""Path of a field: names and list indices."""

NOT_YET = {
    "spec.scheduling.gang": "pods are not scheduled as a gang in this version; use minReplicas",
}
"""Fields of the design that this version cannot execute, and why."""

NOT_YET_VALUES = {
    "spec.spares.mode": "spares are always warm in this version; use Warm",
    "spec.recovery.onHostsLost": "lost shard types are always hosted anew in this version; "
    "use Rehost",
}
"""Fields of which this version cannot execute every value of the design."""


def explain(detail: Mapping[str, Any], fields_at: Callable[[Loc], list[str]]) -> tuple[str, str]:
    """Return (path, message) of one error of the model.

    Args:
        detail: one item of pydantic's ``ValidationError.errors()``.
        fields_at: names of the fields that are valid at a path.
    """
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, InvalidSpecError):
        return cause.field, cause.message
    loc: Loc = tuple(part for part in detail["loc"] if part != "literal['Auto']")
    return join_path(loc), _message(detail, loc, cause, fields_at)


def locate(document: object, problem_of: Callable[[object], str | None]) -> tuple[Loc, str | None]:
    """Return the path of the innermost part of a document with a problem, and what is wrong there.

    A part that contains itself has no innermost one: the path has three names then.

    Args:
        document: of the user.
        problem_of: what is wrong with a part; None if nothing is.
    """
    loc: Loc = ()
    part, problem = document, problem_of(document)
    while problem is not None and len(loc) < MAX_DEPTH:
        parts: Iterable[tuple[int | str, object]] = ()
        if isinstance(part, Mapping):
            parts = ((str(key), item) for key, item in part.items())
        elif isinstance(part, list | tuple):
            parts = enumerate(part)
        for name, inner in parts:
            found = problem_of(inner)
            if found is not None:
                loc, part, problem = (*loc, name), inner, found
                break
        else:
            return loc, problem
    return loc[:3], problem


def join_path(loc: Loc) -> str:
    """Return a path as the user would write it: ``spec.workload.args[0]``."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "document"


def _message(
    detail: Mapping[str, Any],
    loc: Loc,
    cause: Exception | None,
    fields_at: Callable[[Loc], list[str]],
) -> str:
    kind, value = detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        return _unknown(loc, fields_at(loc[:-1]))
    if kind == "missing":
        return "is missing"
    if cause is not None:
        return str(cause)
    if kind in ("int_or_auto", "quantity"):
        return str(detail["msg"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        found = "nothing" if value is None else type(value).__name__
        valid = f" ({', '.join(fields_at(loc))})" if kind != "dict_type" else ""
        return f"expected fields{valid}, found {found}"
    if kind == "literal_error":
        if value is False and "'Off'" in detail["ctx"]["expected"]:
            return (
                f"is false, must be {detail['ctx']['expected']}; YAML reads Off without quotes so"
            )
        only = NOT_YET_VALUES.get(join_path(loc))
        return (
            f"is {quote(value)}, but {only}"
            if only
            else f"is {quote(value)}, must be {detail['ctx']['expected']}"
        )
    shown = type(value).__name__ if isinstance(value, Mapping | list) else quote(value)
    return f"is {shown}, {str(detail['msg']).replace('Input should', 'must')}"


def _unknown(loc: Loc, valid: list[str]) -> str:
    planned = NOT_YET.get(join_path(loc))
    if planned:
        return f"is not available: {planned}; remove it"
    close = difflib.get_close_matches(str(loc[-1]), valid, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown field; {hint}valid here: {', '.join(valid)}"
