"""Turns values into JSON and back, by the annotations of their dataclasses.

One codec serves every message, so the wire format has one set of rules. Unknown fields are accepted
and dropped, as a newer peer may send more. Missing fields take their default or are refused by
name. A wrong type is refused by the path of the field. A message that has older formats has a
static method ``modernized``, which turns their JSON into that of the newest one. Only the standard
library is used, as trainers import this too.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union

from mainstay_core.base.errors import MalformedError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return ``value`` as JSON-ready dicts, lists, strings and numbers."""
    # The most frequent type comes first: states of large jobs have a hundred thousand values.
    kind: type = type(value)
    if value is None or kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names is not None:
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, frozenset | set):
        return sorted((encode(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(cls: type[T], data: Any, path: str = "") -> T:
    """Return an instance of ``cls`` read from ``encode``'s output.

    Raises:
        MalformedError: a field is missing or has the wrong type; the
            message names its path.
    """
    return typing.cast(T, _decode(cls, data, path or cls.__name__))


def dumps(value: Any) -> str:
    """Return canonical JSON: sorted keys, no white space, so equal values have equal bytes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def loads(cls: type[T], text: str | bytes) -> T:
    """Return an instance of ``cls`` from JSON text.

    Raises:
        MalformedError: the text is no JSON or does not fit ``cls``.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise MalformedError(cls.__name__, f"not JSON: {error}") from error
    return decode(cls, data)


_PLAIN = frozenset({str, int, float, bool})


@cache
def _field_names(cls: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for any other type."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def _modernizer(cls: type) -> Callable[[Any], Any] | None:
    return getattr(cls, "modernized", None)


def _decode(kind: Any, data: Any, path: str) -> Any:
    supertype = getattr(kind, "__supertype__", None)
    if supertype is not None:
        return _decode(supertype, data, path)
    if kind is Any:
        return data
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, data, path)
    if origin is Literal:
        return _decode_literal(typing.get_args(kind), data, path)
    if origin is not None:
        return _decode_container(origin, typing.get_args(kind), data, path)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(data)
        except ValueError as error:
            raise MalformedError(path, str(error)) from error
    return _decode_scalar(kind, data, path)


def _decode_union(kind: Any, data: Any, path: str) -> Any:
    members = typing.get_args(kind)
    if data is None and type(None) in members:
        return None
    for member in members:
        if member is type(None):
            continue
        try:
            return _decode(member, data, path)
        except MalformedError:
            if len([m for m in members if m is not type(None)]) == 1:
                raise
    raise MalformedError(path, f"{data!r} fits none of {kind}")


def _decode_literal(values: tuple[Any, ...], data: Any, path: str) -> Any:
    for value in values:
        if data == value and isinstance(data, bool) == isinstance(value, bool):
            return value
    told = ", ".join(repr(encode(value)) for value in values)
    raise MalformedError(path, f"{data!r} is not {told}")


def _decode_container(origin: Any, args: tuple[Any, ...], data: Any, path: str) -> Any:
    if origin in (tuple, frozenset, list):
        if not isinstance(data, list | tuple):
            raise MalformedError(path, f"expected a list, got {type(data).__name__}")
        if (origin is tuple and len(args) == 2 and args[1] is not Ellipsis) or len(args) > 2:
            if len(data) != len(args):
                raise MalformedError(path, f"expected {len(args)} items, got {len(data)}")
            return tuple(
                _decode(a, d, f"{path}[{i}]")
                for i, (a, d) in enumerate(zip(args, data, strict=True))
            )
        return origin(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise MalformedError(path, f"expected an object, got {type(data).__name__}")
        return {
            _decode_key(args[0], k, path): _decode(args[1], v, f"{path}.{k}")
            for k, v in data.items()
        }
    raise MalformedError(path, f"unsupported type {origin}")


def _decode_key(kind: Any, key: Any, path: str) -> Any:
    if kind is not int:
        return str(key)
    try:
        return int(key)
    except ValueError as error:
        raise MalformedError(path, f"expected integer keys, got {key!r}") from error


def _decode_dataclass(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise MalformedError(path, f"expected an object, got {type(data).__name__}")
    modernized = _modernizer(kind)
    if modernized is not None:
        data = modernized(data)
    hints = _hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            values[field.name] = _decode(
                hints[field.name], data[field.name], f"{path}.{field.name}"
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise MalformedError(f"{path}.{field.name}", "missing")
    return kind(**values)


def _decode_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind is int and isinstance(data, bool):
        raise MalformedError(path, "expected int, got bool")
    if not isinstance(kind, type) or not isinstance(data, kind):
        name = getattr(kind, "__name__", str(kind))
        raise MalformedError(path, f"expected {name}, got {type(data).__name__}")
    return data
