"""Lines in which the requests of a job's pods wait, so that other jobs and people do not.

A job has a few places at a time. One whose pods ask for much has a single one, each of its requests
also lets what others ask go first, and a place that was used rests for longer than that took.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from mainstay_api.limits import AT_ONCE_OF_EAGER, AT_ONCE_OF_JOB, PODS_OF_EAGER, Asked
from mainstay_api.long_work import Places

HEARTBEATS = "heartbeats"
GIVE_WAY_S = 0.05
"""A request of pods that ask for much waits for others' for so long at most: some answer in five
milliseconds, and a job must go on even if somebody always asks."""

RESTS = 3.0
"""A place of pods that ask for much rests for so many times as long as it was used, and the answer
waits as well: so they have a quarter of this process at most, and less where it is slow."""
MAX_REST_S = 0.25


class Lines:
    """The lines of all jobs, and who goes before them.

    Args:
        clock: monotonic, in seconds.
        rest: lets so many seconds pass.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._rest = clock, rest
        self._usual = Places(AT_ONCE_OF_JOB)
        self._eager = Places(AT_ONCE_OF_EAGER)
        self._num_ahead = 0
        self._nobody_ahead = asyncio.Event()
        self._nobody_ahead.set()

    @contextlib.asynccontextmanager
    async def wait(self, asked: Asked, *, eager: bool) -> AsyncIterator[None]:
        """Wait for a place in the line of a pod's request, and hold it while the block lasts.

        Args:
            asked: the request.
            eager: the pods have asked for much (:meth:`mainstay_api.limits.Limits.is_eager`).
        """
        line = _line_of(asked)
        if not eager:
            async with self._usual.place(line, asked.num_pods):
                with self.ahead():
                    yield
            return
        async with self._eager.place(line, asked.num_pods // PODS_OF_EAGER):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nobody_ahead.wait(), GIVE_WAY_S)
            began_s = self._clock()
            try:
                yield
            finally:
                # Each pod has to be heard every second, however slow everything is.
                if asked.route != HEARTBEATS:
                    await self._rest(min(MAX_REST_S, RESTS * (self._clock() - began_s)))

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Go before the requests of eager pods, while the block lasts."""
        self._num_ahead += 1
        self._nobody_ahead.clear()
        try:
            yield
        finally:
            self._num_ahead -= 1
            if not self._num_ahead:
                self._nobody_ahead.set()


def _line_of(asked: Asked) -> str:
    """Return the line in which a supervisor's request waits for its turn.

    Heartbeats have one of their own: whatever else a pod asks, and however long it takes, no other
    pod of its job becomes silent by it.
    """
    return f"{asked.job} heartbeats" if asked.route == HEARTBEATS else asked.job
