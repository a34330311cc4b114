"""Turns values into JSON and back, by the annotations of their dataclasses.

One codec serves every message, so the wire format has one set of rules. Unknown fields are accepted
and dropped, as a newer peer may send more. Missing fields take their default or are refused by
name. A wrong type is refused by the path of the field. A message that has older formats has a
static method ``modernized``, which turns their JSON into that of the newest one. A field that few
jobs use has the metadata :data:`OMITTED` and is not sent while it is empty. Only the standard
library is used, as trainers import this too.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union

from mainstay_core.base.bounds import Bound, Longest, Range, Tree
from mainstay_core.base.errors import MalformedError
from mainstay_core.base.words import quote

T = TypeVar("T")

OMITTED: Mapping[str, bool] = types.MappingProxyType({"omitted_while_empty": True})
"""Metadata of a dataclass's field that is left out of the JSON while it has its default, which says
that there is nothing. So a job that does not use it sends the bytes, and has the hashes of them,
that it had before there was the field.
"""


def encode(value: Any) -> Any:
    """Return ``value`` as JSON-ready dicts, lists, strings and numbers."""
    # The most frequent type comes first: states of large jobs have a hundred thousand values.
    kind: type = type(value)
    if value is None or kind in _PLAIN:
        return value
    names = _field_names(kind)
    if names is not None:
        encoded = {name: encode(getattr(value, name)) for name in names}
        for name, default in _omitted_defaults(kind):
            if encoded[name] == default:
                del encoded[name]
        return encoded
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
        MalformedError: a field is missing, has the wrong type or is out of its
            bounds (:mod:`mainstay_core.base.bounds`); the message names its path.
    """
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(data))
    except MalformedError as error:
        raise _below(path or getattr(cls, "__name__", str(cls)), error) from None


def dumps(value: Any) -> str:
    """Return canonical JSON: sorted keys, no white space, so equal values have equal bytes."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"))


def loads(cls: type[T], text: str | bytes) -> T:
    """Return an instance of ``cls`` from JSON text.

    Raises:
        MalformedError: the text is no JSON or does not fit ``cls``.
    """
    return decode(cls, parse_json(text, getattr(cls, "__name__", str(cls))))


def parse_json(text: str | bytes, path: str) -> Any:
    """Return the value of JSON text.

    Args:
        text: of a peer.
        path: what the text is, for the error.

    Raises:
        MalformedError: it is no JSON, is not UTF-8, or is nested too deep for the parser.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise MalformedError(path, f"not JSON: {error}") from error
    except RecursionError as error:
        raise MalformedError(path, "not JSON: it is nested too deep") from error


_PLAIN = frozenset({str, int, float, bool})

_SIZED = (list, str, dict, tuple, Mapping)
"""What has a length; the types that JSON yields come first, as a look at the last one is slow."""

Decoder = Callable[[Any], Any]
"""Reads one type. Its errors name the path below the value; who calls it adds what is above."""


@cache
def _field_names(cls: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for any other type."""
    if not dataclasses.is_dataclass(cls):
        return None
    return tuple(field.name for field in dataclasses.fields(cls))


@cache
def _omitted_defaults(cls: type) -> tuple[tuple[str, Any], ...]:
    """Return the fields that are left out while they have their defaults, with these as JSON."""
    return tuple(
        (field.name, encode(field.default))
        for field in dataclasses.fields(cls)
        if field.metadata == OMITTED
    )


@cache
def _decoder(kind: Any) -> Decoder:
    """Return what reads a type. Types are looked at once: a large state has many values."""
    supertype = getattr(kind, "__supertype__", None)
    if supertype is not None:
        return _decoder(supertype)
    if kind is Any:
        return lambda data: data
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(args[0], [mark for mark in args[1:] if isinstance(mark, Bound)])
    if origin in (Union, types.UnionType):
        return _union(kind, args)
    if origin is Literal:
        return _literal(args)
    if origin in (tuple, frozenset, list):
        return _items(origin, args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enumeration(kind)
    if isinstance(kind, type):
        return _scalar(kind)
    raise TypeError(f"cannot decode {kind}")


def _below(step: str, error: MalformedError) -> MalformedError:
    """Return the error of a value inside another one, as the outer one tells it."""
    return MalformedError(f"{step}{error.field}", error.problem)


def _bounded(plain: Any, limits: list[Bound]) -> Decoder:
    decode_plain = _decoder(plain)
    # First the size: a list that is too long must not cost its items.
    early = any(isinstance(limit, Longest | Tree) for limit in limits)

    def read(data: Any) -> Any:
        value = data if early else decode_plain(data)
        if not early or isinstance(data, _SIZED):
            for limit in limits:
                problem = limit.problem_of(value)
                if problem is not None:
                    raise MalformedError("", problem)
        return decode_plain(data) if early else value

    return _quick(plain, limits, read)


def _quick(plain: Any, limits: list[Bound], read: Decoder) -> Decoder:
    """Return a decoder that sees at once that a number or a text is good; else it asks ``read``.

    In a large quorum a member reads thousands of them in each step.
    """
    while hasattr(plain, "__supertype__"):
        plain = plain.__supertype__
    match plain, limits:
        case _, [Range(low, high)] if plain in (int, float) and math.isfinite(low + high):

            def read_number(data: Any) -> Any:
                return data if type(data) is plain and low <= data <= high else read(data)

            return read_number
        case _, [Longest(length)] if plain is str:

            def read_text(data: Any) -> Any:
                good = type(data) is str and len(data) <= length and data.isascii()
                return data if good else read(data)

            return read_text
        case _:
            return read


def _union(kind: Any, args: tuple[Any, ...]) -> Decoder:
    members = [_decoder(member) for member in args if member is not type(None)]
    optional = type(None) in args
    if len(members) == 1:
        only = members[0]
        return (lambda data: None if data is None else only(data)) if optional else only

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        for member in members:
            try:
                return member(data)
            except MalformedError:
                continue
        raise MalformedError("", f"{quote(data)} fits none of {kind}")

    return read


def _literal(values: tuple[Any, ...]) -> Decoder:
    told = ", ".join(repr(encode(value)) for value in values)

    def read(data: Any) -> Any:
        for value in values:
            if data == value and isinstance(data, bool) == isinstance(value, bool):
                return value
        raise MalformedError("", f"{quote(data)} is not {told}")

    return read


def _items(origin: Any, args: tuple[Any, ...]) -> Decoder:
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return _fixed([_decoder(arg) for arg in args])
    item = _decoder(args[0])

    def read(data: Any) -> Any:
        _check_list(data)
        found: list[Any] = []
        try:
            for value in data:
                found.append(item(value))  # noqa: PERF401 - the error names the place
        except MalformedError as error:
            raise _below(f"[{len(found)}]", error) from None
        return origin(found)

    return read


def _fixed(items: list[Decoder]) -> Decoder:
    def read(data: Any) -> Any:
        _check_list(data)
        if len(data) != len(items):
            raise MalformedError("", f"expected {len(items)} items, got {len(data)}")
        found = []
        for at, (item, value) in enumerate(zip(items, data, strict=True)):
            try:
                found.append(item(value))
            except MalformedError as error:
                raise _below(f"[{at}]", error) from None
        return tuple(found)

    return read


def _check_list(data: Any) -> None:
    if not isinstance(data, (list, tuple)):
        raise MalformedError("", f"expected a list, got {type(data).__name__}")


def _mapping(args: tuple[Any, ...]) -> Decoder:
    read_key = _integer_key if args[0] is int else _decoder(args[0])
    read_item = _decoder(args[1])

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise MalformedError("", f"expected an object, got {type(data).__name__}")
        found = {}
        for key, value in data.items():
            try:
                found[read_key(key)] = read_item(value)
            except MalformedError as error:
                name = key if isinstance(key, str) and key.isidentifier() else quote(key)
                raise _below(f".{name[:100]}", error) from None
        return found

    return read


def _integer_key(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError) as error:
        raise MalformedError("", f"expected integer keys, got {quote(key)}") from error


def _dataclass(kind: type) -> Decoder:
    modernized: Callable[[Any], Any] | None = getattr(kind, "modernized", None)
    # Filled at the first value, not here: a type may contain itself.
    fields: list[tuple[str, Decoder, bool]] = []

    def read(data: Any) -> Any:
        if type(data) is not dict and not isinstance(data, Mapping):
            raise MalformedError("", f"expected an object, got {type(data).__name__}")
        if not fields:
            fields.extend(_fields_of(kind))
        if modernized is not None:
            data = modernized(data)
        values, name = {}, ""
        try:
            for name, decode_field, needed in fields:
                if name in data:
                    values[name] = decode_field(data[name])
                elif needed:
                    raise MalformedError("", "missing")
        except MalformedError as error:
            raise _below(f".{name}", error) from None
        try:
            return kind(**values)
        except ValueError as error:  # fields that contradict each other
            raise MalformedError("", str(error)) from error

    return read


def _fields_of(kind: Any) -> list[tuple[str, Decoder, bool]]:
    """Return name, decoder and whether it must be there, of each field."""
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return [
        (f.name, _decoder(hints[f.name]), f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
    ]


def _enumeration(kind: type[enum.Enum]) -> Decoder:
    def read(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError:
            told = ", ".join(repr(member.value) for member in kind)
            raise MalformedError("", f"{quote(data)} is not one of {told}") from None

    return read


def _scalar(kind: type) -> Decoder:
    def read(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise MalformedError("", f"{quote(data)} does not fit a float") from None
        if not isinstance(data, kind) or isinstance(data, bool):
            raise MalformedError("", f"expected {kind.__name__}, got {type(data).__name__}")
        return data

    return read
