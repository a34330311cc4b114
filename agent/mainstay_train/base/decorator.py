"""The decorator that marks a user's function as an own training loop. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")
"""The session's type, `LoopSession`. It is defined above this room."""


@dataclass(frozen=True, slots=True)
class Loop(Generic[S]):
    """An entrypoint that is a training loop of the user's own."""

    function: Callable[[S], None]

    def __call__(self, session: S) -> None:
        """Run it."""
        self.function(session)


def loop(function: Callable[[S], None]) -> Loop[S]:
    """Mark a function as an own training loop: it takes a session and returns when the job is over.

    Use as a decorator; see docs/own-loop.md.
    """
    return Loop(function)
