"""Starts and ends a command line. The commands load what they need themselves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import typer

from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.words import printable_lines


def run_app(commands: typer.Typer, arguments: Sequence[str], program: str) -> None:
    """Run commands: one message for an error, and the exit code that belongs to it.

    Args:
        commands: what there is to run.
        arguments: what the user wrote.
        program: what the user calls it.
    """
    signal.signal(signal.SIGINT, _interrupt)
    try:
        commands(list(arguments), prog_name=program)
    except BrokenPipeError:
        # The reader of our output has left, e.g. ``| head``.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MainstayError, OSError) as error:
        if os.environ.get("MAINSTAY_DEBUG") == "1":
            raise
        # It may quote what an api, a trainer or a file says.
        print(f"{program}: {printable_lines(str(error))}", file=sys.stderr)
        sys.exit(int(error.code if isinstance(error, CliError) else ExitCode.FAILED))


def _interrupt(_number: int, _frame: object) -> None:
    raise SystemExit(int(ExitCode.INTERRUPTED))
