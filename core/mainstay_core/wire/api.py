"""The values of a supervisor's requests and of the api's answers, and the kinds of failure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import MAX_FAULTS, Count, Document, Instant, Labels, Longest, Name
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The api's answer to a pod's registration."""

    config: JobConfig
    plan: Plan | None = None
    cursor: Name = ""
    """Where the stream goes on."""
    manifest: Document = field(default_factory=dict)
    """The job as its user wrote it: held for a store that loses it."""
    restored_at_s: Instant = 0.0
    """When the store was last told its state by a supervisor; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The api's answer to a heartbeat."""

    quorum: QuorumId | None = None
    state: Name = "running"
    """``running``, or the phase for which a supervisor ends."""
    restored_at_s: Instant = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJob:
    """The state of a job as one of its supervisors holds it."""

    pod: PodUid
    config: JobConfig
    manifest: Document = field(default_factory=dict)
    plan: Plan | None = None
    """None: the job had none yet."""
    step: Count = 0
    """Number of steps that the pod's trainers have committed in that plan's quorum or before."""
    fingerprint: Labels | None = None
    """Numerics fingerprint of a member on this pod."""
    fired: Annotated[tuple[Name, ...], Longest(MAX_FAULTS)] = ()
    """Injected faults that this supervisor has carried out."""
    approximate_since: Count | None = field(default=None, metadata=OMITTED)
    """Since which step the job is approximate, as the pod's newest ledger entry says."""


class Failure(enum.Enum):
    """The kinds of failed requests, by what they mean for the program that sent them."""

    UNREACHED = "unreached"
    """Nobody answered."""
    AWAY = "away"
    """The api cannot answer now, e.g. because its store is away."""
    BROKEN = "broken"
    """The api, or a server on the way to it, made a mistake."""
    NOT_UNDERSTOOD = "not-understood"
    """It answered, and the answer cannot be read: one of the two is of another version."""
    BUSY = "busy"
    """The request came too slowly, or too many came."""
    UNAUTHORIZED = "unauthorized"
    """The caller is not known, or may not do this."""
    UNKNOWN = "unknown"
    """The job, or what else the path names, is not known."""
    CONFLICT = "conflict"
    """The job's state does not allow it, or has moved on."""
    DELETED = "deleted"
    """The job was deleted."""
    REFUSED = "refused"
    """The request itself is wrong."""


_FAILURES = {
    401: Failure.UNAUTHORIZED,
    403: Failure.UNAUTHORIZED,
    404: Failure.UNKNOWN,
    408: Failure.BUSY,
    409: Failure.CONFLICT,
    410: Failure.DELETED,
    429: Failure.BUSY,
    503: Failure.AWAY,
}


def failure_of(status: int) -> Failure:
    """Return what an HTTP status that is no success means."""
    return _FAILURES.get(status, Failure.REFUSED if 400 <= status < 500 else Failure.BROKEN)


def is_no_answer(status: int) -> bool:
    """Return whether an HTTP status settles nothing, so that the request is sent again later.

    The server cannot answer now or has failed, or it has been asked too often.
    """
    return status >= 500 or status == 429


UNKNOWN_FORMAT = "unknown-format"
"""Name of the problem that a message is of a newer format than the api knows."""


MAX_RETRY_AFTER_S = 30.0
"""A server that asks for a longer wait is asked again after this: the wait may be over by then."""


def read_retry_after(text: str | None) -> float:
    """Return for how many seconds an answer's header ``Retry-After`` asks to wait; 0 without one.

    A date (RFC 9110, section 10.2.3) counts as none: the api sends numbers of seconds.
    """
    if text is None or not text.isascii() or not text.isdecimal():
        return 0.0
    return min(MAX_RETRY_AFTER_S, float(text[:9]))


class ApiError(MainstayError):
    """A request to the api failed.

    Args:
        message: what went wrong, for people.
        failure: what follows from it, for the program.
        retry_after_s: how long the api asks to wait before the next request; 0: it does not.
    """

    def __init__(self, message: str, failure: Failure, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.failure, self.retry_after_s = failure, retry_after_s

    @property
    def is_away(self) -> bool:
        """Whether the api, or its store, is away: it may be back in a moment."""
        return self.failure in (Failure.UNREACHED, Failure.AWAY)

    @property
    def is_answer(self) -> bool:
        """Whether the api, or who guards it, understood the request and said no."""
        none = (Failure.BROKEN, Failure.NOT_UNDERSTOOD, Failure.BUSY)
        return not self.is_away and self.failure not in none

    @property
    def is_busy(self) -> bool:
        """Whether the api is there, and wants to be asked less, or faster."""
        return self.failure is Failure.BUSY

    @property
    def is_final(self) -> bool:
        """Whether to send the same request again is of no use."""
        return self.failure in (Failure.CONFLICT, Failure.DELETED, Failure.REFUSED)


class ApiUnavailable(ApiError):  # noqa: N818 - a state of the api, not a mistake
    """The api gave no answer that counts: try again later."""

    def __init__(
        self,
        message: str,
        failure: Failure = Failure.UNREACHED,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message, failure, retry_after_s)


class ApiRefused(ApiError):  # noqa: N818 - an answer, not a mistake of ours
    """The api understood the request and said no.

    Args:
        status: HTTP status.
        error: the problem's name for programs, e.g. ``unregistered``.
        detail: the problem's text for people.
        plan: the plan in force, if the answer carries it.
    """

    def __init__(
        self, status: int, error: str = "", detail: object = "", plan: Plan | None = None
    ) -> None:
        super().__init__(f"{status}: {detail}", failure_of(status))
        self.error, self.plan = error, plan

    @property
    def is_unknown(self) -> bool:
        """Whether the api does not know the job, the pod or our plan: register again."""
        return self.failure is Failure.UNKNOWN or self.error in ("unregistered", "store-behind")

    @property
    def is_not_understood(self) -> bool:
        """Whether the api is older than what was told: it understands that once it is up to date.

        Unlike a refusal this says nothing about what was told.
        """
        return self.error == UNKNOWN_FORMAT

    @property
    def is_deleted(self) -> bool:
        """Whether the job was deleted: there is nothing left to do."""
        return self.failure is Failure.DELETED
