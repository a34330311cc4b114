"""Prepares launcher and forge for their forks: torch is imported once, and logs go to stderr."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_fork.children import share_imports
from mainstay_train.base import environment

PRELOADED = ("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes")
"""What every trainer imports; torch imports the last, and sympy with it, in the first backward."""


def warm_up(modules: Iterable[str]) -> None:
    """Import torch and ``modules`` once, without starting a thread; children then fork with them.

    A module's function ``warm_up``, if it has one, is called: it does once what
    every child would do first.

    Raises:
        MainstayError: the imports left threads running, so that forking is unsafe.
    """
    environment.prepare()
    for name in (*PRELOADED, *modules):
        prepare = getattr(importlib.import_module(name), "warm_up", None)
        if prepare is not None:
            prepare()
    share_imports()


def resolve(reference: str) -> Callable[..., Any]:
    """Return the function named ``module:function``.

    Raises:
        InvalidSpecError: there is no such function.
    """
    module, _, name = reference.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidSpecError(
            "trainer", f"{reference!r} must name an importable module:function ({error})"
        ) from error
    if not callable(found):
        raise InvalidSpecError("trainer", f"{reference!r} is not a function")
    return found  # type: ignore[no-any-return]


def log_to_stderr() -> None:
    """Send log records to stderr, one line each, with the time."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
