"""What a supervisor asks of the api, and what the api answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import PodUid, QuorumId
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The api's answer to a pod's registration."""

    config: JobConfig
    plan: Plan | None = None
    cursor: str = ""
    """Where the stream goes on."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """The job as its user wrote it: held for a store that loses it."""
    restored_at_s: float = 0.0
    """When the store was last told its state by a supervisor; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    """The api's answer to a heartbeat."""

    quorum: QuorumId | None = None
    state: str = "running"
    """``running``, or the phase for which a supervisor ends."""
    restored_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldJob:
    """What a supervisor holds of its job."""

    pod: PodUid
    config: JobConfig
    manifest: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    """None: the job had none yet."""
    step: int = 0
    """Number of steps that the pod's trainers have committed in that plan's quorum or before."""
    fingerprint: dict[str, str] | None = None
    """Numerics fingerprint of a member on this pod."""
    fired: tuple[str, ...] = ()
    """Injected faults that this supervisor has carried out."""


class ApiUnavailable(MainstayError):  # noqa: N818 - a state of the api, not a mistake
    """The api gave no answer that counts: try again later."""


class ApiRefused(MainstayError):  # noqa: N818 - an answer, not a mistake of ours
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
        super().__init__(f"{status}: {detail}")
        self.status, self.error, self.plan = status, error, plan

    @property
    def is_unknown(self) -> bool:
        """Whether the api does not know the job, the pod or our plan: register again."""
        return self.status == 404 or self.error in ("unregistered", "store-behind")

    @property
    def is_deleted(self) -> bool:
        """Whether the job was deleted: there is nothing left to do."""
        return self.status == 410
