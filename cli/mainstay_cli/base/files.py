"""Writes a file as a whole: whoever reads it finds what was there before, or all of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text over what a file held; where that fails, the file is as it was.

    A device or a pipe holds nothing that could be lost: the text goes straight into it.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()  # a link stays one
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)  # as a full disk leaves it
