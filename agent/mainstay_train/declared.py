"""How a user's function says that it is an own loop. Imports no torch: users import it first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainstay_train.own_loop import LoopSession


@dataclass(frozen=True, slots=True)
class Loop:
    """An entrypoint that is a training loop of the user's own."""

    function: Callable[[LoopSession], None]

    def __call__(self, session: LoopSession) -> None:
        """Run it."""
        self.function(session)


def loop(function: Callable[[LoopSession], None]) -> Loop:
    """Mark a function as an own training loop: it takes a session and returns when the job is over.

    Use as a decorator; see docs/own-loop.md.
    """
    return Loop(function)
