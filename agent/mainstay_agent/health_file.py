"""Writes the file in the pod's directory that says how the supervisor is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

from mainstay_core.supervisor.health import HEALTH_FILE, SHOW_EVERY_S, show_health

logger = logging.getLogger(__name__)


class HealthFile:
    """The file, written when what it says changes and touched while it does not.

    Args:
        pod_dir: the pod's directory.
        why_not: returns why the pod is not ready; empty if it is.
    """

    def __init__(self, pod_dir: Path, why_not: Callable[[], str]) -> None:
        self._path = pod_dir / HEALTH_FILE
        self._why_not = why_not
        self._shown = ""
        self._is_warned = False

    async def run(self) -> None:
        """Show it again and again."""
        while True:
            self.show()
            await asyncio.sleep(SHOW_EVERY_S)

    def show(self) -> None:
        """Say how it is now.

        Where no file can be written there is none: then probes ask the supervisor itself.
        """
        text = show_health(self._why_not())
        try:
            if text == self._shown:
                os.utime(self._path)
            else:
                beside = self._path.with_suffix(".new")
                beside.write_text(text)
                beside.replace(self._path)
            self._shown, self._is_warned = text, False
        except OSError as error:
            self._shown = ""
            with contextlib.suppress(OSError):
                self._path.unlink()
            if not self._is_warned:
                logger.warning("%s cannot be written: %s", self._path, error)
            self._is_warned = True
