"""The bearer token of a pod, which is replaced while the pod runs.

A projected ServiceAccount token lives for an hour or so; the kubelet writes the next
one when most of that is over. So the file is looked at before each request, and read
anew when it is another one than last time, or when the api has refused what we have.
"""

from __future__ import annotations

import logging

from mainstay_agent.settings import SupervisorSettings

logger = logging.getLogger(__name__)

_Mark = tuple[int, int, int]


class Token:
    """The bearer token to present to the api now.

    Args:
        settings: the token, or the file that it is in.

    Raises:
        OSError: the file cannot be read at the start.
    """

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._mark = self._look()
        self._token = settings.read_token()

    @property
    def header(self) -> str:
        """Value of the header ``Authorization``."""
        mark = self._look()
        if mark != self._mark:
            self._mark = mark
            self.read_again()
        return f"Bearer {self._token}"

    def read_again(self) -> None:
        """The api has refused the token, or its file has changed."""
        try:
            self._token = self._settings.read_token()
        except OSError as error:
            # It is being replaced, or the volume is in trouble: what we have may do for a while.
            logger.warning("the token cannot be read: %s", error)

    def _look(self) -> _Mark | None:
        """What tells the file from the one that was there before: it is replaced by a link."""
        if self._settings.token_file is None:
            return None
        try:
            found = self._settings.token_file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns
