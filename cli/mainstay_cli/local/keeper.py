"""Keeps one service of a run: starts it, sees it end, says why, and starts it again.

:mod:`mainstay_cli.local.restarts` decides whether and when. Here that is only done.
"""

from __future__ import annotations

import asyncio
import logging
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from mainstay_cli.base.exits import CliError, ExitCode, MachineError
from mainstay_cli.base.logs import last_lines, read_since, size_of
from mainstay_cli.local.processes import Child
from mainstay_cli.local.restarts import RestartMemory, RestartPolicy, plan_restart
from mainstay_cli.local.shortage import Shortage, explain, find_full, find_in, of_error

logger = logging.getLogger(__name__)

READY_INTERVAL_S = 0.05
"""Between two questions whether a service that was started serves."""
TAIL_LINES = 5
"""Lines of its log that are shown when a service is given up."""
SIGNAL_CODES = 128
"""An exit code above this is a signal's number and this, as shells and our guard say it."""


class Keeper:
    """Keeps one service alive.

    Args:
        title: what people call it, at the start of a sentence.
        log: file that its output goes to.
        places: directories that it needs room in.
        spawn: starts its process.
        serves: asks whether it answers.
        policy: the bounds on restarts.
        clock: never jumps, in seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        *,
        title: str,
        log: Path,
        places: Sequence[Path],
        spawn: Callable[[], Child],
        serves: Callable[[], Awaitable[bool]],
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._title, self._log, self._places = title, log, places
        self._spawn, self._serves = spawn, serves
        self._policy = policy or RestartPolicy()
        self._clock, self._sleep = clock, sleep
        self._memory = RestartMemory()
        self._child: Child | None = None
        self._log_start = 0
        """Size of the log when the newest process was started."""
        self._not_started: OSError | None = None
        """Why the newest try did not even make a process."""
        self._up = asyncio.Event()

    async def start(self) -> None:
        """Start it for the first time and return when it serves.

        Raises:
            MachineError: it ended instead.
        """
        if not await self._try_start():
            raise MachineError(f"{self._describe_end()}{self._last_words()} (see {self._log})")

    async def keep(self) -> None:
        """Start it again whenever it ends, until cancelled.

        Raises:
            CliError: it has ended too often.
        """
        served = True
        while True:
            assert self._child is not None
            await asyncio.shield(self._child.ended)
            self._up.clear()
            restart = plan_restart(self._memory, self._policy, served=served, now_s=self._clock())
            self._memory = restart.memory
            if restart.pause_s is None:
                raise self._give_up(restart.reason)
            when = f"in {restart.pause_s:g} s" if restart.pause_s else "at once"
            logger.warning(
                "%s; training goes on; it is started again %s (%s)%s",
                self._describe_end(),
                when,
                restart.reason,
                self._last_words(),
            )
            await self._sleep(restart.pause_s)
            served = await self._try_start()

    async def wait_up(self) -> Child:
        """Return its process, once it serves."""
        await self._up.wait()
        assert self._child is not None
        return self._child

    async def _try_start(self) -> bool:
        """Start it, and return whether it serves: if not, it has ended."""
        self._log_start, self._not_started = size_of(self._log), None
        try:
            child = self._child = self._spawn()
        except OSError as error:
            self._not_started = error
            if self._child is None:
                raise  # the first start: nothing has been lost yet
            return False
        while not await self._serves():
            if child.ended.done():
                return False
            await asyncio.wait([child.ended], timeout=READY_INTERVAL_S)
        self._up.set()
        return True

    # --- what is said of an end ------------------------------------------------------------------

    def _describe_end(self) -> str:
        """Return how it ended and why, as far as that is known."""
        if self._not_started is not None:
            error = self._not_started
            lacks = of_error(error)
            why = f"{explain(lacks, self._places)} ({error})" if lacks else str(error)
            return f"{self._title} could not be started: {why}"
        lacks = self._find_shortage()
        cause = f": {explain(lacks, self._places)}" if lacks else ""
        return f"{self._title} ended ({self._how()}){cause}"

    def _find_shortage(self) -> Shortage | None:
        if self._code() >= SIGNAL_CODES:
            return None  # somebody else has ended it
        lacks = find_in(self._said())
        # On a full disk a program may have no room left to say so.
        return Shortage.DISK if lacks is None and find_full(self._places) else lacks

    def _give_up(self, reason: str) -> CliError:
        tail = textwrap.indent(last_lines(self._said(), TAIL_LINES) or "nothing", "  ")
        logger.warning("%s ends with:\n%s", self._log, tail)
        return CliError(
            f"{self._describe_end()}{self._last_words()} (see {self._log}); {reason}, so "
            "it is not started again; mend that and run the job again, with --resume if it wrote "
            "checkpoints",
            ExitCode.FAILED,
        )

    def _said(self) -> str:
        """Return what its newest process said."""
        try:
            return read_since(self._log, self._log_start)
        except OSError as error:  # this machine may be too short of descriptors to read it
            return f"{self._log}: {error.strerror}"

    def _last_words(self) -> str:
        """Return what it said last, to go on a sentence with; nothing if there was no process."""
        if self._not_started is not None:
            return ""
        return f"; it said last: {last_lines(self._said(), 1) or 'nothing'}"

    def _code(self) -> int:
        """Return its exit code; a signal counts as shells have it."""
        assert self._child is not None
        code = self._child.ended.result() or 0
        return code if code >= 0 else SIGNAL_CODES - code

    def _how(self) -> str:
        code = self._code()
        return f"signal {code - SIGNAL_CODES}" if code > SIGNAL_CODES else f"code {code}"
