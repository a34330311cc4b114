"""Writes a file as a whole, and reads a user's within a bound.

Whoever reads a file that is being written finds what was there before, or all of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from mainstay_cli.base.exits import UsageError

MAX_FILE_BYTES = 64 << 20
"""A file of the user that is longer is not read: a trace of a million failures, or a profile of
ten thousand operators, takes a quarter of it."""


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that the user names.

    Args:
        path: of the file.
        what: the option or argument that names it, for the error.

    Raises:
        UsageError: it cannot be read, is too long, or no UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{what}: {path} cannot be read: {why}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{what}: {path} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what}: {path} is no UTF-8 text") from error


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
