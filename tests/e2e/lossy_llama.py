"""A user's workload for tests: the small LLaMA, over a gloo that loses one message.

gloo loses an operation now and then when a peer is killed: who waits for it waits for ever,
whatever becomes of the group. Here the first wait for a message that would end with its group does
not. The argument is a directory, in which a file says that it has happened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from mainstay_train.comm import gloo, group
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama


class LossyGloo(gloo.Gloo):
    """Loses the first message that is waited for when its group ends."""

    lost = Path()

    def wait(self, work: Any, timeout: timedelta) -> None:
        """Wait for an operation; collectives that end have raised before."""
        try:
            super().wait(work, timeout)
        except RuntimeError:
            try:
                os.close(os.open(self.lost, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                raise
            threading.Event().wait()  # only the end of the process ends it


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    """Return the small LLaMA."""
    LossyGloo.lost = Path(args[0]) / "lost"
    group.BACKENDS["gloo"] = LossyGloo()
    return llama.workload(dict(config))
