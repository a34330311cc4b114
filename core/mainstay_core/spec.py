"""The TrainingJob: one model for the YAML of local mode, the api and the CRD.

Field names are Python's here and camelCase on the wire. What a user writes is
refused with the path of the field, what is wrong and what would be right: a
field that is silently ignored is worse than none, so a field of a later version
is refused by name as well. Durations are whole ``...Seconds`` and enumerations
CamelCase, the conventions of Kubernetes.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
import pydantic.alias_generators
import pydantic_core

from mainstay_core.errors import InvalidSpecError
from mainstay_core.faults import FaultPoint
from mainstay_core.ids import JobUid
from mainstay_core.jobspec import JobConfig
from mainstay_core.spec_messages import explain
from mainstay_core.topology import JobShape

API_VERSION = "mainstay.dev/v1alpha1"
KIND = "TrainingJob"
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


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        alias_generator=pydantic.alias_generators.to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
    )


class Metadata(_Model):
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


class Training(_Model):
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


class Parallelism(_Model):
    """How many ranks serve the job, and in what arrangement."""

    replicas: Positive | None = None
    """Replicas wanted; as many as lanes when left out."""
    min_replicas: Positive = 1
    """Replicas with which the job may start when not all pods came in time."""
    stages: Positive = 1
    ranks_per_stage: Literal[1] = 1
    ranks_per_pod: Positive = 1
    """Slots of a pod; its loss is one fault."""


class Pipeline(_Model):
    """The order of work inside a replica. It never changes the bits."""

    schedule: Literal["1F1B"] = "1F1B"
    micro_batches: Positive = 1
    """Micro-batches of one shard type."""
    order: Literal["InOrder"] = "InOrder"


class Workload(_Model):
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


class Runtime(_Model):
    """How the ranks compute and talk: settings independent of each other."""

    device: Literal["Auto", "CPU", "CUDA"] = "Auto"
    """Auto is CUDA where there is one."""
    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """Auto is NCCL when every rank has a CUDA device of its own, else Gloo."""
    recompute: bool = False
    """Run each block's forward again in the backward instead of keeping what it saved."""


class Spares(_Model):
    """Standby pods, warm: registered, torch imported, without state."""

    replicas: NotNegative = 0
    """Number of standby pods."""


class Detection(_Model):
    """When silence counts as a fault. Failures that are noticed do not wait for any of these."""

    hang_seconds: Positive = 300
    """A rank that runs (does not wait for others) without any progress this long is killed."""
    heartbeat_seconds: Positive = 1
    """Interval of a pod's heartbeat."""
    heartbeat_timeout_seconds: Positive = 15
    """A pod this far behind the job's newest heartbeat counts as gone."""


class Checkpoint(_Model):
    """Durable copies of the state."""

    storage: str | None = None
    """A directory that all pods see; local mode chooses one in the job's state directory."""
    every_steps: NotNegative = 0
    """0 switches durable checkpoints off."""

    @pydantic.field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"is {value!r}, must be the absolute path of a directory")
        return value


class RecoveryPolicy(_Model):
    """What a recovery may do. Rows of the ladder that cannot be executed yet are not offered."""

    allow_approximate: Literal[False] = False
    on_hosts_lost: Literal["Rehost"] = "Rehost"
    max_restarts: NotNegative = 10
    """Restarts of one slot's trainer without a commit in between; then it stays down."""
    restart_grace_seconds: NotNegative = 10
    """How long a lost rank's place waits for its own pod's new trainer before a spare takes it."""


class Scheduling(_Model):
    """How the job gets its pods."""

    startup_deadline_seconds: Positive = 120
    """Then the job starts with what is there, if that is minReplicas, else it fails."""


class TrainingJobSpec(_Model):
    """What a user asks for."""

    suspend: bool = False
    training: Training
    parallelism: Parallelism = Parallelism()
    redundancy: IntOrAuto = "Auto"
    """Hosts of a shard type. Auto follows SPARe's optimum (section 5, eq. 8)."""
    pipeline: Pipeline = Pipeline()
    workload: Workload
    runtime: Runtime = Runtime()
    template: dict[str, Any] = {}
    """Pod template, kept as it is; local mode makes processes and does not read it."""
    spares: Spares = Spares()
    detection: Detection = Detection()
    checkpoint: Checkpoint = Checkpoint()
    recovery: RecoveryPolicy = RecoveryPolicy()
    scheduling: Scheduling = Scheduling()


class TrainingJob(_Model):
    """The custom resource. Build it with :func:`parse_training_job`, which explains mistakes."""

    api_version: Literal["mainstay.dev/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    spec: TrainingJobSpec
    status: dict[str, Any] | None = None
    """Written by the operator alone; accepted so that ``kubectl get -o yaml`` can be read back."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        _check_topology(self.spec)
        _check_settings(self.spec)
        return self

    @property
    def shape(self) -> JobShape:
        """The degrees, with every default and Auto resolved."""
        spec = self.spec
        parallelism = spec.parallelism
        return JobShape(
            lanes=spec.training.lanes,
            shards_per_lane=spec.training.resolved_shards_per_lane,
            replicas=parallelism.replicas or spec.training.lanes,
            min_replicas=parallelism.min_replicas,
            stages=parallelism.stages,
            ranks_per_stage=parallelism.ranks_per_stage,
            ranks_per_pod=parallelism.ranks_per_pod,
            micro_batches=spec.pipeline.micro_batches,
            steps=spec.training.steps,
            seed=spec.training.seed,
            checkpoint_every_steps=spec.checkpoint.every_steps,
        )

    @property
    def num_worker_pods(self) -> int:
        """Pods that the wanted replicas need."""
        shape = self.shape
        return math.ceil(shape.num_cells * shape.ranks_per_stage / shape.ranks_per_pod)

    @property
    def num_pods(self) -> int:
        """Pods of the job, spares included."""
        return self.num_worker_pods + self.spec.spares.replicas

    def to_job_config(
        self,
        job_uid: JobUid,
        faults: tuple[FaultPoint, ...] = (),
        checkpoint_dir: str = "",
    ) -> JobConfig:
        """Return the job as its processes see it.

        Args:
            job_uid: identity of this run of the job.
            faults: what to inject, from :mod:`mainstay_core.fault_files`.
            checkpoint_dir: where durable checkpoints go when the spec names no
                storage; unused while ``everySteps`` is 0.
        """
        spec = self.spec
        storage = spec.checkpoint.storage or checkpoint_dir
        redundancy = spec.redundancy
        return JobConfig(
            job=job_uid,
            name=self.metadata.name,
            shape=self.shape,
            entrypoint=spec.workload.entrypoint,
            args=spec.workload.args,
            workload=spec.workload.config,
            device=spec.runtime.device.lower(),
            backend=spec.runtime.backend.lower(),
            recompute=spec.runtime.recompute,
            redundancy=None if redundancy == "Auto" else redundancy,
            checkpoint_dir=storage if spec.checkpoint.every_steps else "",
            heartbeat_s=float(spec.detection.heartbeat_seconds),
            heartbeat_timeout_s=float(spec.detection.heartbeat_timeout_seconds),
            hang_s=float(spec.detection.hang_seconds),
            # A back-stop only: it must outlast a hang and the longest step (protocol section 5).
            operation_timeout_s=max(1800.0, 4.0 * spec.detection.hang_seconds),
            restart_grace_s=float(spec.recovery.restart_grace_seconds),
            startup_deadline_s=float(spec.scheduling.startup_deadline_seconds),
            max_restarts=spec.recovery.max_restarts,
            faults=faults,
        )


def parse_training_job(data: object) -> TrainingJob:
    """Return the job that loaded YAML or JSON describes.

    Raises:
        InvalidSpecError: something cannot be used; ``field`` is the path of the
            first mistake and the message says what would be right, for all.
    """
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else type(data).__name__
        raise InvalidSpecError(
            "document", f"expected a {KIND} (apiVersion, kind, metadata, spec), found {found}"
        )
    try:
        return TrainingJob.model_validate(data)
    except pydantic.ValidationError as error:
        problems = [explain(dict(d), _fields_at) for d in error.errors(include_url=False)]
        field, message = problems[0]
        others = "".join(f"\n{other_field}: {other}" for other_field, other in problems[1:])
        raise InvalidSpecError(field, message + others) from None


def _check_topology(spec: TrainingJobSpec) -> None:
    """Refuse degrees that contradict each other."""
    lanes = spec.training.lanes
    parallelism = spec.parallelism
    replicas = parallelism.replicas or lanes
    if replicas > lanes:
        raise InvalidSpecError(
            "spec.parallelism.replicas",
            f"is {replicas}, but there are only {lanes} lanes, and a lane has at most one "
            f"replica; use at most {lanes}, or raise spec.training.lanes",
        )
    if parallelism.min_replicas > replicas:
        raise InvalidSpecError(
            "spec.parallelism.minReplicas",
            f"is {parallelism.min_replicas}, must be at most the replicas ({replicas})",
        )
    if isinstance(spec.redundancy, int) and spec.redundancy > lanes:
        raise InvalidSpecError(
            "spec.redundancy",
            f"is {spec.redundancy}, but a shard type has at most one host per lane; use at most "
            f"{lanes}, or Auto",
        )
    num_ranks = replicas * parallelism.stages * parallelism.ranks_per_stage
    if parallelism.ranks_per_pod > num_ranks:
        raise InvalidSpecError(
            "spec.parallelism.ranksPerPod",
            f"is {parallelism.ranks_per_pod}, but the job has only {num_ranks} ranks "
            f"({replicas} replicas x {parallelism.stages} stages); use at most {num_ranks}",
        )


def _check_settings(spec: TrainingJobSpec) -> None:
    if spec.runtime.device == "CPU" and spec.runtime.backend == "NCCL":
        raise InvalidSpecError(
            "spec.runtime.backend", "is NCCL, which needs CUDA; use Gloo or Auto with device CPU"
        )
    detection = spec.detection
    least = 3 * detection.heartbeat_seconds
    if detection.heartbeat_timeout_seconds < least:
        raise InvalidSpecError(
            "spec.detection.heartbeatTimeoutSeconds",
            f"is {detection.heartbeat_timeout_seconds}, must be at least {least}: three times "
            "heartbeatSeconds, so that one late heartbeat is no fault",
        )


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model at a path, as the user writes them."""
    model: type[pydantic.BaseModel] = TrainingJob
    for part in loc:
        for name, field in model.model_fields.items():
            if part in (field.alias, name):
                candidates = (field.annotation, *typing.get_args(field.annotation))
                model = next(
                    (c for c in candidates if isinstance(c, type) and issubclass(c, _Model)), model
                )
    return [field.alias or name for name, field in model.model_fields.items()]
