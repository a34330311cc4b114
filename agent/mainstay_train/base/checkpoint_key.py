"""The keys that sign checkpoints, as the pod was given them (``MAINSTAY_CHECKPOINT_KEY_FILE``)."""

from __future__ import annotations

import os
from pathlib import Path

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.wire.sealed import KEY_FILE_VARIABLE, MAX_KEY_FILE_BYTES, parse_keys


def read() -> tuple[bytes, ...]:
    """Return the keys, the one that signs first; none when the pod was given no file.

    Raises:
        InvalidSpecError: the file cannot be read, or holds no key.
    """
    path = os.environ.get(KEY_FILE_VARIABLE, "")
    if not path:
        return ()
    try:
        with Path(path).open() as file:
            return parse_keys(file.read(MAX_KEY_FILE_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpecError(KEY_FILE_VARIABLE, f"{path} cannot be read: {error}") from error
