"""The job's secret as this trainer's pod was given it (``MAINSTAY_SECRET_FILE``)."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from mainstay_core.base import proofs


@functools.cache
def read() -> str:
    """Return the secret, empty when the pod was given none.

    Raises:
        OSError: the file cannot be read.
    """
    path = os.environ.get("MAINSTAY_SECRET_FILE", "")
    return Path(path).read_text().strip() if path else ""


def prove(*asked: object) -> str:
    """Return what shows another pod of the job that this is one."""
    return proofs.prove(read(), *asked)


def is_proved(proof: object, *asked: object) -> bool:
    """Return whether another pod has shown that it is one of the job's."""
    return proofs.is_proved(read(), proof, *asked)
