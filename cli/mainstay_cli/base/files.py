"""Writes a file as a whole, says early whether it can, and reads a user's within a bound.

Whoever reads a file that is being written finds what was there before, or all of it.
"""

from __future__ import annotations

import contextlib
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


def check_place(path: Path, what: str) -> None:
    """Refuse a place for a file before the work begins whose result is to be written there.

    Args:
        path: of the file, which may be there already; its directories may be missing.
        what: the option that names it, for the error.

    Raises:
        UsageError: no file could be written there.
    """
    if path.is_dir():
        raise UsageError(f"{what}: {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    parent = path.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{what}: {path} cannot be written: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{what}: {path} cannot be written: no permission to write in {parent}")


def write_whole(path: Path, text: str) -> None:
    """Write a text over what a file held; where that fails, the file is as it was.

    A device or a pipe holds nothing that could be lost: the text goes straight into it. Directories
    that are missing are made.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path = path.resolve()  # a link stays one
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text)
        scratch.replace(path)
    except OSError as error:
        # Of the two names the one that the user knows.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(NotADirectoryError):  # nothing lies beneath a file
            scratch.unlink(missing_ok=True)  # as a full disk leaves it
