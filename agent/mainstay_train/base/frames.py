"""Has Python keep the frames of a step's calls in one piece of memory.

CPython takes memory for frames in pieces of 16 KiB, and gives a piece back to the kernel as soon as
the first frame in it returns. If the calls of a step's kernels happen to lie around the end of a
piece, each of them takes one and gives it back, which takes longer than what Python does for it.
A frame that needs more gets a piece as large as the next power of two, and what is left of that is
there for the frames behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

SLOTS = 8300
"""Values for which a frame has room: a little more than 64 KiB, so that its piece has 128 KiB. What
is left is enough for a few hundred calls, one within the other."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def roomy(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose calls find the frames behind them in one piece of memory."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
    return wraps(function)(call)
