"""Tells a crash by its exception: class, message and the last frames of the user's code."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

import torch

from mainstay_core.wire.crashes import MAX_FRAMES, Crash

OURS = ("mainstay_core.", "mainstay_train.")
"""Modules of ours that a user's exception passes through."""
_NOT_THE_USERS = (
    str(Path(inspect.getfile(Crash)).parents[1]),
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
)
_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")


def crash_of(error: BaseException) -> Crash:
    """Return the crash that an exception is, without the place in the job where it happened.

    Of an error of ours that was raised from the user's, it is the user's.
    """
    while type(error).__module__.startswith(OURS) and error.__cause__ is not None:
        error = error.__cause__
    return Crash(type=_name(type(error)), message=_message(error), frames=_frames(error))


def _name(kind: type) -> str:
    plain = kind.__module__ == "builtins" or kind.__module__.startswith("mainstay_")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        # The user's class may not be able to say what it is.
        return f"(its text cannot be had: {type(second).__name__})"


def _frames(error: BaseException) -> tuple[str, ...]:
    """Return the last frames of the user's code; without any the frame that raised the error.

    Of an error of ours that frame says nothing to the user.
    """
    summary = traceback.extract_tb(error.__traceback__)
    shown = [f"{f.filename}:{f.lineno} in {f.name}" for f in summary if _is_users(f.filename)]
    if not shown and summary and not type(error).__module__.startswith(OURS):
        shown = [f"{summary[-1].filename}:{summary[-1].lineno} in {summary[-1].name}"]
    return tuple(shown[-MAX_FRAMES:])


def _is_users(file: str) -> bool:
    """Return whether a file is neither ours, nor torch's, nor Python's."""
    if file.startswith((*_NOT_THE_USERS, "<frozen")):
        return False
    return not file.startswith(_LIBRARY) or any(name in file for name in _INSTALLED)
