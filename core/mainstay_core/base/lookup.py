"""Finds values of a tuple by their keys, without looking at all of them each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Lookup(Generic[_Key, _Value]):
    """Finds values of a tuple by key, in constant time for the tuple asked for last.

    It is a memo, not a state: tuples never change, so the same tuple has the same answer.
    """

    def __init__(self, key: Callable[[_Value], _Key]) -> None:
        self._key = key
        self._last: tuple[tuple[_Value, ...], dict[_Key, _Value]] = ((), {})

    def __call__(self, values: tuple[_Value, ...]) -> dict[_Key, _Value]:
        last, found = self._last
        if last is not values:
            found = {self._key(value): value for value in values}
            self._last = (values, found)
        return found
