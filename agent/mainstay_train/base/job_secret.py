"""The job's secret as this trainer's pod was given it (``MAINSTAY_SECRET_FILE``)."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def read() -> str:
    """Return the secret, empty when the pod was given none.

    Raises:
        OSError: the file cannot be read.
    """
    path = os.environ.get("MAINSTAY_SECRET_FILE", "")
    return Path(path).read_text().strip() if path else ""
