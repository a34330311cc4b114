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

Many errors quote what a peer or a user wrote. What an error says is cut to the length of a
sentence, and can be written as UTF-8: it is logged, stored and sent back.
"""

from __future__ import annotations

from mainstay_core.base.bounds import cut

MAX_FIELD_CHARS = 1024
"""Characters of the path of a field: its keys are a peer's or a user's."""


class MainstayError(Exception):
    """Base of every exception that Mainstay raises on purpose.

    Args:
        message: what went wrong, for people.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(cut(message))


class InvalidSpecError(MainstayError, ValueError):
    """The user wrote something that cannot be used.

    Args:
        field: path of the field, e.g. ``spec.training.lanes``.
        message: what is wrong and what would be right.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = cut(field, MAX_FIELD_CHARS)
        self.message = cut(message)
        super().__init__(f"{self.field}: {self.message}")


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
        self.field = cut(field, MAX_FIELD_CHARS)
        self.problem = cut(problem)
        super().__init__(f"{self.field}: {self.problem}")


class StoreConflictError(MainstayError):
    """Another writer came first. Read again and decide again."""


class IntegrityError(MainstayError):
    """Received or loaded bytes do not have their announced digest."""


class OwnershipError(MainstayError):
    """A directory of checkpoints belongs to another job."""


def brief(error: BaseException) -> str:
    """Return the first line of what an error says, or its type: people are told one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
