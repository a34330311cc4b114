"""Says during a run when this machine runs short of room or descriptors.

Nobody else would: a program that is out of descriptors answers late or not at all, and nobody reads
its log meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mainstay_cli.base.logs import read_since, size_of
from mainstay_cli.local.shortage import Shortage, explain, find_full, find_in, of_error

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks."""
TELL_EVERY_S = 60.0
"""Between two warnings of one shortage that lasts."""


class MachineWatch:
    """Looks at what is left of what a run needs.

    Args:
        places: directories that the run writes to.
        logs: files in which a shortage would be told of.
        clock: never jumps, in seconds.
    """

    def __init__(
        self,
        places: Sequence[Path],
        logs: Sequence[Path],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places, self._clock = places, clock
        self._read = dict.fromkeys(logs, 0)
        """Bytes of each log that were read."""
        self._told_at_s: dict[Shortage | None, float] = {}

    async def run(self) -> None:
        """Look and warn, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Warn of what lacks now, unless that was told of a moment ago."""
        try:
            found = self._find()
        except OSError as error:
            lacks = of_error(error)
            if lacks is None:  # a disk that cannot be asked does not end a run
                self._tell(None, f"what is left on this machine is not known: {error}")
                return
            found = {lacks: "this command itself has none left"}
        for lacks, evidence in found.items():
            self._tell(lacks, f"{explain(lacks, self._places)}: {evidence}")

    def _tell(self, about: Shortage | None, text: str) -> None:
        now_s = self._clock()
        if now_s - self._told_at_s.get(about, -TELL_EVERY_S) >= TELL_EVERY_S:
            self._told_at_s[about] = now_s
            logger.warning("%s", text)

    def _find(self) -> dict[Shortage, str]:
        """Return what lacks, and where that was seen.

        Raises:
            OSError: something lacks so much that nothing can be found out.
        """
        found: dict[Shortage, str] = {}
        # One that can be opened is one that is left.
        os.close(os.open(os.devnull, os.O_RDONLY))
        for log, start in self._read.items():
            self._read[log] = size_of(log)
            lacks = find_in(read_since(log, start))
            if lacks is not None:
                found[lacks] = f"{log} says so"
        if find_full(self._places):
            found[Shortage.DISK] = "training goes on, but logs, history and checkpoints may be lost"
        return found
