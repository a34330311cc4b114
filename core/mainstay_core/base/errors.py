"""The exception tree.

::

    MainstayError
    +-- InvalidSpecError (ValueError)   the user's job, faults file or settings; names the field
    +-- InfeasiblePlanError             no plan exists; carries the reason, drives a condition
    +-- ProtocolError
    |   +-- LocalProtocolError          this process sent an event its state does not accept: a bug
    |   +-- RemoteProtocolError         the peer did: stale quorum, unknown slot, bad frame
    |       +-- MalformedError          a message is none; names the field
    +-- StoreConflictError              a compare-and-set lost its race; read again and retry
    +-- IntegrityError                  bytes do not have the digest they were announced with
    +-- OwnershipError                  another job's storage; names that job

A user's mistake is a ``ValueError`` that names the field and what would be
right. ``assert`` is for invariants only. Core never catches broadly; shells
translate at their boundary and chain with ``from``.
"""

from __future__ import annotations


class MainstayError(Exception):
    """Base of every exception that Mainstay raises on purpose."""


class InvalidSpecError(MainstayError, ValueError):
    """The user wrote something that cannot be used.

    Args:
        field: path of the field, e.g. ``spec.training.lanes``.
        message: what is wrong and what would be right.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class InfeasiblePlanError(MainstayError):
    """No plan exists. This is no bug: the reason becomes the job's condition."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ProtocolError(MainstayError):
    """A message or an event does not fit the state that it meets."""


class LocalProtocolError(ProtocolError):
    """This process broke the protocol: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: stale, unknown or malformed."""


class MalformedError(RemoteProtocolError):
    """A message of a peer cannot be read.

    Args:
        field: path of the field in the message.
        problem: what is wrong there.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class StoreConflictError(MainstayError):
    """Another writer came first. Read again and decide again."""


class IntegrityError(MainstayError):
    """Received or loaded bytes do not have their announced digest."""


class OwnershipError(MainstayError):
    """A directory of checkpoints belongs to another job."""


def brief(error: BaseException) -> str:
    """Return the first line of what an error says, or its type: people are told one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
