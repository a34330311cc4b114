"""The sections of a TrainingJob: one model per group of fields, with defaults and bounds.

:mod:`mainstay_core.spec` puts them together and checks what concerns several.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pydantic
import pydantic.alias_generators
import pydantic_core

MAX_NAME_LENGTH = 40
"""Leaves room for the suffixes of pod names within the 63 characters of a label."""
MAX_AUTO_SHARDS_PER_LANE = 16
"""With 16, a step after one loss among 64 lanes is 1.06x; more types cost more than they win."""
MAX_SEED = 2**63 - 1

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_ENTRYPOINT = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")


def _int_or_auto(value: object) -> object:
    if value == "Auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise pydantic_core.PydanticCustomError(
        "int_or_auto", "is {value}, must be a whole number from 1, or Auto", {"value": repr(value)}
    )


IntOrAuto = Annotated[
    Annotated[int, pydantic.Field(ge=1)] | Literal["Auto"],
    pydantic.BeforeValidator(_int_or_auto),
]
Positive = Annotated[int, pydantic.Field(ge=1)]
NotNegative = Annotated[int, pydantic.Field(ge=0)]


class Section(pydantic.BaseModel):
    """A group of fields: camelCase on the wire, nothing unknown, nothing converted."""

    model_config = pydantic.ConfigDict(
        alias_generator=pydantic.alias_generators.to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )


class Metadata(Section):
    """Kubernetes owns this part: what it adds besides the name is accepted and left alone."""

    model_config = pydantic.ConfigDict(extra="ignore")

    name: str
    """RFC 1035 label of at most 40 characters."""
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or len(value) > MAX_NAME_LENGTH:
            raise ValueError(
                f"is {value!r}, must be at most {MAX_NAME_LENGTH} lower-case letters, digits and "
                "'-', starting with a letter and ending with a letter or digit"
            )
        return value


class Training(Section):
    """What the job computes. Identifies it: changing any of it makes another job."""

    steps: Positive
    """Optimizer steps of the whole job."""
    seed: Annotated[int, pydantic.Field(ge=0, le=MAX_SEED)] = 0
    """Of the initial parameters, the data's order and every random draw."""
    lanes: Positive
    """Homes of shard types; the most replicas the job can ever have."""
    shards_per_lane: IntOrAuto = "Auto"
    """Shard types of a lane. Auto: the fewest that spread a lost lane evenly over the others,
    lanes - 1, at most 16."""

    @property
    def resolved_shards_per_lane(self) -> int:
        """Number of shard types per lane, Auto resolved from the lanes alone."""
        if self.shards_per_lane == "Auto":
            return max(1, min(MAX_AUTO_SHARDS_PER_LANE, self.lanes - 1))
        return self.shards_per_lane


class Parallelism(Section):
    """How many ranks serve the job, and in what arrangement."""

    replicas: Positive | None = None
    """Replicas wanted; as many as lanes when left out."""
    min_replicas: Positive = 1
    """Replicas with which the job may start when not all pods came in time."""
    stages: Positive = 1
    ranks_per_stage: Positive = 1
    """Ranks of a cell: the size of the inner mesh that the workload's blocks are spread over."""
    ranks_per_pod: Positive = 1
    """Slots of a pod; its loss is one fault."""


class Pipeline(Section):
    """The order of work inside a replica. It never changes the bits."""

    schedule: Literal["1F1B"] = "1F1B"
    micro_batches: Positive = 1
    """Micro-batches of one shard type."""
    order: Literal["InOrder"] = "InOrder"


class Workload(Section):
    """The user's code."""

    entrypoint: str
    """``module:function`` or ``path/to/file.py:function`` that returns the workload."""
    args: Annotated[tuple[str, ...], pydantic.Field(strict=False)] = ()
    config: dict[str, Any] = {}
    """Given to the entrypoint as it is; its own fields are checked there."""

    @pydantic.field_validator("entrypoint")
    @classmethod
    def _check_entrypoint(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            raise ValueError(
                f"is {value!r}, must be module:function or path/to/file.py:function, "
                "e.g. mainstay_train.models.llama:workload"
            )
        return value


class Runtime(Section):
    """How the ranks compute and talk: settings independent of each other."""

    device: Literal["Auto", "CPU", "CUDA"] = "Auto"
    """Auto is CUDA where there is one."""
    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """Auto is NCCL when every rank has a CUDA device of its own, else Gloo."""
    recompute: bool = False
    """Run each block's forward again in the backward instead of keeping what it saved."""


class Spares(Section):
    """Standby pods, warm: registered, torch imported, without state."""

    replicas: NotNegative = 0
    """Number of standby pods."""


class Detection(Section):
    """When silence counts as a fault. Failures that are noticed do not wait for any of these."""

    hang_seconds: Positive = 300
    """A rank that runs (does not wait for others) without any progress this long is killed."""
    heartbeat_seconds: Positive = 1
    """Interval of a pod's heartbeat."""
    heartbeat_timeout_seconds: Positive = 15
    """A pod this far behind the job's newest heartbeat counts as gone."""


class Checkpoint(Section):
    """Durable copies of the state."""

    storage: str | None = None
    """A directory that all pods see; local mode chooses one in the job's state directory."""
    every_steps: NotNegative = 0
    """A checkpoint each time that so many steps are applied since the newest, and one of the
    last step. 0 switches durable checkpoints off."""
    keep: Annotated[int, pydantic.Field(ge=2)] = 2
    """Complete checkpoints that are kept. At least two: the newest may turn out to be damaged."""
    resume_from: str | None = None
    """Directory of an earlier run's checkpoints: go on from the newest good one. Replicas, stages
    and slots per pod may differ. Only read, never changed."""

    @pydantic.field_validator("storage", "resume_from")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"is {value!r}, must be the absolute path of a directory")
        return value


class RecoveryPolicy(Section):
    """What a recovery may do. Rows of the ladder that cannot be executed yet are not offered."""

    allow_approximate: Literal[False] = False
    on_hosts_lost: Literal["Rehost"] = "Rehost"
    max_restarts: NotNegative = 10
    """Restarts of one slot's trainer without a commit in between; then it stays down."""
    restart_grace_seconds: NotNegative = 10
    """How long a lost rank's place waits for its own pod's new trainer before a spare takes it."""
    handover_seconds: NotNegative = 30
    """How long a pod that is told to end (SIGTERM) serves on until its work is handed over. In a
    cluster the pod's terminationGracePeriodSeconds must be larger. 0: it ends at once."""
    hold_back_seconds: NotNegative = 1
    """A trainer that ends twice in a row without a commit in between is not let in for so long;
    twice as long after each further end. Counted per slot and per failure domain."""
    hold_back_max_seconds: Positive = 300
    """Bound of that."""


class Scheduling(Section):
    """How the job gets its pods."""

    startup_deadline_seconds: Positive = 120
    """Then the job starts with what is there, if that is minReplicas, else it fails."""
