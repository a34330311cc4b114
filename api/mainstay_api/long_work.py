"""Does long work in such a way that the event loop goes on meanwhile.

What takes more than some milliseconds runs in another thread, or in pieces with turns of the event
loop between them. A thread gives the interpreter up every few milliseconds, so others wait for no
more than that; a single call into C does not, so no such call gets much to do at a time: bodies and
lists are bounded, and long answers are encoded item by item.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

from starlette.responses import Response

from mainstay_core.coordinator.state import CoordinatorState

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

LARGE = 256
"""A job with more pods and slots is decided about, encoded and decoded in a thread: at about 10
microseconds for each of them it takes more than the 0.2 ms that the way to a thread and back costs
many times over."""
LARGE_TEXT = 128 * 1024
"""Characters of such a job's state."""
PIECE = 100
"""Items that are decoded at a time, about 20 microseconds each."""
AT_ONCE = 6
"""Answers about a job's whole history that are made at a time: each takes some 50 MiB of memory."""
AT_ONCE_OF_ONE = 2
"""Of one person: whoever asks for many waits for themselves, and the others do not."""


async def beside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what ``work`` returns; it runs in a thread if the job is large.

    Args:
        size: of the job, as :func:`size_of` counts.
        work: touches nothing that others change meanwhile.
        args: of it.
        kwargs: of it.
    """
    if size <= LARGE:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def size_of(state: CoordinatorState) -> int:
    """Return how large a job is, as far as the cost of decisions is concerned."""
    return len(state.slots) + len(state.pods)


async def in_pieces(work: Callable[[V], T], items: Sequence[V]) -> list[T]:
    """Return what ``work`` makes of each item; others get their turn now and then."""
    done: list[T] = []
    for first in range(0, len(items), PIECE):
        done += [work(item) for item in items[first : first + PIECE]]
        if first + PIECE < len(items):
            await asyncio.sleep(0)
    return done


class Places:
    """The places in which work of many askers is done at a time: few for each of them.

    Args:
        of_one: places that one asker has.
        in_all: places of all; None: as many as askers have.
    """

    def __init__(self, of_one: int, in_all: int | None = None) -> None:
        self._of_one = of_one
        self._all = None if in_all is None else asyncio.Semaphore(in_all)
        self._of: dict[str, asyncio.Semaphore] = {}
        self._num_more: dict[str, int] = {}
        self._num_askers: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def place(self, asker: str, num_more: int = 0) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block lasts.

        Args:
            asker: whose place it is.
            num_more: places that the asker has now beside ``of_one``. It loses none before it asks
                for nothing at all.
        """
        mine = self._of.setdefault(asker, asyncio.Semaphore(self._of_one))
        for _ in range(num_more - self._num_more.get(asker, 0)):
            mine.release()
        self._num_more[asker] = max(num_more, self._num_more.get(asker, 0))
        self._num_askers[asker] += 1
        try:
            async with mine, self._all or contextlib.nullcontext():
                yield
        finally:
            self._num_askers[asker] -= 1
            if not self._num_askers[asker]:
                del self._num_askers[asker], self._num_more[asker], self._of[asker]


def long_answers() -> Places:
    """Return the places in which answers about a job's whole history are made."""
    return Places(AT_ONCE_OF_ONE, AT_ONCE)


async def long_json(make: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Response:
    """Return an answer with the JSON of what ``make`` returns, made and encoded in a thread."""

    def encode() -> bytes:
        return b"".join(_pieces_of(make(*args, **kwargs)))

    return Response(await asyncio.to_thread(encode), media_type="application/json")


def _pieces_of(value: Any, depth: int = 3) -> Iterable[bytes]:
    """Yield the JSON of a value; of its outer levels each item by itself."""
    if depth and isinstance(value, dict):
        yield b"{"
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"") + _encode(key) + b":"
            yield from _pieces_of(item, depth - 1)
        yield b"}"
    elif depth and isinstance(value, list | tuple):
        yield b"["
        for number, item in enumerate(value):
            if number:
                yield b","
            yield from _pieces_of(item, depth - 1)
        yield b"]"
    else:
        yield _encode(value)


def _encode(value: Any) -> bytes:
    # As the framework does for all other answers.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()
