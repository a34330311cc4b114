"""Exit codes, and the one way in which a command ends with an error."""

from __future__ import annotations

import enum

from mainstay_core.base.errors import MainstayError


class ExitCode(enum.IntEnum):
    """Exit codes of ``mainstay``, as ``mainstay --help`` shows them."""

    OK = 0
    FAILED = 1
    """The job failed, or two things that should be equal differ."""
    USAGE = 2
    """The command line, the job or the faults file cannot be used."""
    ENVIRONMENT = 3
    """This machine cannot do it now: port in use, no Redis, too little memory or disk."""
    INTERRUPTED = 130


class CliError(MainstayError):
    """One clear message for standard error, and the exit code.

    Args:
        message: what is wrong and what would be right.
        code: what the process exits with.
    """

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


class UsageError(CliError):
    """An error in what the user wrote."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class MachineError(CliError):
    """This machine cannot do it now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.ENVIRONMENT)
