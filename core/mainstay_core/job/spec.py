"""Defines the TrainingJob: one model for the YAML of local mode, the api and the CRD.

Field names are Python's here and camelCase on the wire. What cannot be used is refused with the
path of the field, what is wrong and what would be right. A field that is silently ignored is worse
than none, so a field of a later version is refused by name as well. Durations are whole
``...Seconds`` and enumerations CamelCase, by the conventions of Kubernetes.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic
import pydantic.alias_generators

from mainstay_core.base.bounds import MAX_HOSTS, MAX_MEMBERS, MAX_TYPES, Tree
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape, Order
from mainstay_core.base.words import count, quote
from mainstay_core.dmr.settings import MAX_WAITING_BYTES, PLANNED, WAY, Mode, PlanName
from mainstay_core.dmr.witness import MIN_CHAINS
from mainstay_core.faults.points import FaultPoint
from mainstay_core.job import model_sizes
from mainstay_core.job.approximation import (
    approximate_config,
    check_approximate,
    permitted_config,
)
from mainstay_core.job.config import JobConfig, SnapshotConfig
from mainstay_core.job.detection_sections import Detection
from mainstay_core.job.guards import check_guards, check_two_ends, resolve_guards
from mainstay_core.job.refusals import explain, join_path, locate
from mainstay_core.job.sections import (
    DEFAULT_MANAGER,
    Checkpoint,
    Metadata,
    Parallelism,
    Pipeline,
    Protection,
    RecoveryPolicy,
    Runtime,
    Scheduling,
    Section,
    Snapshots,
    Spares,
    Supervisor,
    Training,
    Workload,
)
from mainstay_core.job.sentences import (
    COMPILE_OFF,
    EVEN_MICRO_BATCHES,
    ONE_MICRO_BATCH_SWAPPED,
    ONE_STAGE_SWAPPED,
    REPLAY_GRADIENTS,
    WAY_IN_PATH,
    swapped_only_with,
)
from mainstay_core.job.sizes import snapshot_sizes
from mainstay_core.job.sizes.built_in_sizes import check_built_in
from mainstay_core.job.sizes.snapshot_logs import LogChoice
from mainstay_core.job.stages import cut_blocks, tell_unlike_twins
from mainstay_core.job.types import (
    IntOrAuto,
    ManagerName,
    ObjectName,
    PodTemplate,
    Seconds,
    SecondsOrNone,
)

GROUP, VERSION = "mainstay.dev", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND, PLURAL = "TrainingJob", "trainingjobs"
LABEL_UID = f"{GROUP}/job-uid"
"""Label of a job's objects in a cluster: the job's uid."""
API_AUDIENCE = f"{GROUP}/api"
"""Audience of the tokens by which people ask the api."""
JOB_AUDIENCE = f"{GROUP}/jobs/"
"""Audience of the tokens of a job's pods, followed by the job's uid."""


class TrainingJobSpec(Section):
    """What a user asks for."""

    suspend: bool = False
    """Let go of all pods after a checkpoint; false again, and the job goes on where it was."""
    managed_by: ManagerName = DEFAULT_MANAGER
    """Who takes care of the job in a cluster. The operator leaves jobs of other managers alone."""
    active_deadline_seconds: Seconds | None = None
    """A job that is not complete after so long fails. The clock starts again when a suspended job
    is resumed. In clusters only."""
    ttl_seconds_after_finished: SecondsOrNone | None = None
    """A complete or failed job is deleted so long after its end. In clusters only."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the job's pods. In clusters only."""
    training: Training
    parallelism: Parallelism = Parallelism()
    redundancy: IntOrAuto = "Auto"
    """Lanes whose replicas take a shard type over first. Auto: the number that costs least time."""
    pipeline: Pipeline = Pipeline()
    workload: Workload
    runtime: Runtime = Runtime()
    template: PodTemplate = pydantic.Field(default_factory=dict)
    """Pod template: metadata and spec as in a Deployment, kept as they are. The trainer is the
    container of that name, or the first; a volume that it mounts at /dev/shm is the pod's shared
    memory, else one is made, bounded by the built-in model's size. Can be changed while the job is
    suspended. Local mode makes processes and does not read it."""
    supervisor: Supervisor = Supervisor()
    spares: Spares = Spares()
    detection: Detection = Detection()
    checkpoint: Checkpoint = Checkpoint()
    snapshots: Snapshots = Snapshots()
    protection: Protection = Protection()
    recovery: RecoveryPolicy = RecoveryPolicy()
    scheduling: Scheduling = Scheduling()


class TrainingJob(Section):
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
        _check_swapped(self.spec)
        check_guards(self.spec.recovery, self.shape)
        check_two_ends(self.spec.recovery, self.shape, snapshots=self.spec.snapshots.enabled)
        self.plan_snapshots()
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
            order=spec.pipeline.resolved_order,
            cut=spec.pipeline.resolved_cut,
        )

    @property
    def num_worker_pods(self) -> int:
        """Pods that the wanted replicas need."""
        shape = self.shape
        return math.ceil(shape.num_ranks / shape.ranks_per_pod)

    @property
    def num_pods(self) -> int:
        """Pods of the job, spares included."""
        return self.num_worker_pods + self.spec.spares.replicas

    def plan_snapshots(self) -> SnapshotConfig | None:
        """Return how the state is kept in the memory of pods; None if it is not.

        Raises:
            InvalidSpecError: it cannot be kept as the spec says.
        """
        spec = self.spec
        return snapshot_sizes.plan_snapshots(
            spec.snapshots, spec.protection, spec.workload, self.shape, self.num_pods
        )

    def check_beginning(self) -> None:
        """Refuse what a job must not begin with, and keeps once it has begun.

        Who parses the job of one that runs does not ask: a release that has become stricter takes
        no job away.

        Raises:
            InvalidSpecError: names the field and what would be right.
        """
        check_built_in(self.spec.workload, self.shape)
        snapshot_sizes.check_new_window(self.spec.snapshots, self.spec.workload, self.shape)

    def choose_log(self) -> LogChoice | None:
        """Return from what a lost state is made anew, and why; None in a job without snapshots.

        Raises:
            InvalidSpecError: it cannot be what the spec says.
        """
        spec = self.spec
        if not spec.snapshots.enabled:
            return None
        models = snapshot_sizes.known_models(spec.workload, self.shape)
        return snapshot_sizes.choose_log_of(spec.snapshots, models, self.shape)

    def to_job_config(
        self,
        job_uid: JobUid,
        faults: tuple[FaultPoint, ...] = (),
        checkpoint_dir: str = "",
    ) -> JobConfig:
        """Return the job as its processes see it.

        Args:
            job_uid: identity of this run of the job.
            faults: what to inject, from :mod:`mainstay_core.faults.files`.
            checkpoint_dir: where durable checkpoints go when the spec names no
                storage; unused while ``everySteps`` is 0.
        """
        spec = self.spec
        storage = spec.checkpoint.storage or checkpoint_dir
        resume_from = spec.checkpoint.resume_from or ""
        redundancy, dmr = spec.redundancy, spec.detection.dmr
        return JobConfig(
            job=job_uid,
            name=self.metadata.name,
            shape=self.shape,
            entrypoint=spec.workload.entrypoint,
            args=spec.workload.args,
            workload=spec.workload.config,
            device=spec.runtime.device.lower(),
            backend=spec.runtime.backend.lower(),
            compile=spec.runtime.compile.lower(),
            recompute=spec.runtime.recompute,
            recompute_share=spec.runtime.recompute_share,
            dmr=Mode(dmr.mode),
            dmr_plan=dmr.plan_name,
            dmr_plan_file=dmr.plan if dmr.plan_name is PlanName.FILE else "",
            dmr_profile_steps=dmr.profile_steps if dmr.plan_name in PLANNED else 0,
            dmr_memory_bytes=dmr.waiting_bytes,
            witness_every_steps=spec.detection.witness.every_steps,
            bucket_bytes=spec.runtime.bucket_bytes,
            redundancy=None if redundancy == "Auto" else redundancy,
            checkpoint_dir=storage if spec.checkpoint.every_steps or resume_from else "",
            checkpoint_keep=spec.checkpoint.keep,
            checkpoint_copy_bytes=spec.checkpoint.copy_bytes,
            checkpoint_signed=spec.checkpoint.key_secret is not None,
            resume_from=resume_from,
            resume_version=spec.checkpoint.resume_version or 0,
            heartbeat_s=float(spec.detection.heartbeat_seconds),
            heartbeat_timeout_s=float(spec.detection.heartbeat_timeout_seconds),
            hang_s=float(spec.detection.hang_seconds),
            # A back-stop only: it must outlast a hang and the longest step (protocol section 5).
            operation_timeout_s=max(1800.0, 4.0 * spec.detection.hang_seconds),
            connect_s=float(spec.runtime.connect_seconds),
            restart_grace_s=float(spec.recovery.restart_grace_seconds),
            handover_s=float(spec.recovery.handover_seconds),
            hold_back_s=float(spec.recovery.hold_back_seconds),
            hold_back_max_s=float(spec.recovery.hold_back_max_seconds),
            spares=spec.spares.replicas,
            startup_deadline_s=float(spec.scheduling.startup_deadline_seconds),
            max_restarts=spec.recovery.max_restarts,
            escalate_after=spec.recovery.escalate_after,
            snapshots=self.plan_snapshots(),
            approximate=approximate_config(spec.recovery, spec.checkpoint),
            permitted=permitted_config(spec.recovery, spec.checkpoint),
            goes_back=spec.recovery.on_taint == "Restart",
            guards=resolve_guards(spec.recovery, self.shape, snapshots=spec.snapshots.enabled),
            suspend=spec.suspend,
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
    _check_document(data)
    try:
        return TrainingJob.model_validate(data)
    except pydantic.ValidationError as error:
        problems = [explain(dict(d), _fields_at) for d in error.errors(include_url=False)]
        field, message = problems[0]
        others = "".join(f"\n{other_field}: {other}" for other_field, other in problems[1:])
        raise InvalidSpecError(field, message + others) from None


def _check_document(data: Mapping[str, Any]) -> None:
    """Refuse what could be neither stored nor sent to a pod, wherever it stands."""
    loc, problem = locate(data, Tree().problem_of)
    if problem is not None:
        raise InvalidSpecError(join_path(loc), problem)


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
    if isinstance(spec.redundancy, int) and spec.redundancy > min(lanes, MAX_HOSTS):
        raise InvalidSpecError(
            "spec.redundancy",
            f"is {spec.redundancy}, but a shard type has at most one host per lane, and "
            f"{MAX_HOSTS} in all; use at most {min(lanes, MAX_HOSTS)}, or Auto",
        )
    num_ranks = replicas * parallelism.stages * parallelism.ranks_per_stage
    if parallelism.ranks_per_pod > num_ranks:
        raise InvalidSpecError(
            "spec.parallelism.ranksPerPod",
            f"is {parallelism.ranks_per_pod}, but the job has only {num_ranks} ranks "
            f"({replicas} replicas x {parallelism.stages} stages"
            f"{_inner(parallelism.ranks_per_stage)}); use at most {num_ranks}",
        )
    if num_ranks > MAX_MEMBERS:
        raise InvalidSpecError(
            "spec.parallelism",
            f"makes {num_ranks} ranks ({replicas} replicas x {parallelism.stages} stages"
            f"{_inner(parallelism.ranks_per_stage)}); a plan has at most {MAX_MEMBERS}",
        )
    num_types = lanes * spec.training.resolved_shards_per_lane
    if num_types > MAX_TYPES:
        raise InvalidSpecError(
            "spec.training.shardsPerLane",
            f"makes {num_types} shard types ({lanes} lanes x "
            f"{spec.training.resolved_shards_per_lane}); a step has at most {MAX_TYPES}",
        )


def _check_witness(spec: TrainingJobSpec) -> None:
    every_steps = spec.detection.witness.every_steps
    replicas = spec.parallelism.replicas or spec.training.lanes
    if every_steps and replicas < MIN_CHAINS:
        raise InvalidSpecError(
            "spec.detection.witness.everySteps",
            f"is {every_steps}, but the job has {count(replicas, 'replica')}, so that nobody else "
            f"computes the same; use 0, or {MIN_CHAINS} replicas or more",
        )


def _inner(ranks_per_stage: int) -> str:
    return f" x {ranks_per_stage} ranks" if ranks_per_stage > 1 else ""


def _check_swapped(spec: TrainingJobSpec) -> None:
    """Refuse a swapped pipeline where it cannot be, or not yet."""
    if spec.pipeline.resolved_order is Order.IN_ORDER:
        return
    path, stages = "spec.pipeline.order", spec.parallelism.stages
    if stages < 2:
        raise InvalidSpecError(path, f"is Swapped, but {ONE_STAGE_SWAPPED}")
    lanes, types = spec.training.lanes, spec.training.resolved_shards_per_lane
    if lanes * types * spec.pipeline.micro_batches == 1:
        raise InvalidSpecError(path, f"is Swapped, but {ONE_MICRO_BATCH_SWAPPED}")
    has_file = spec.detection.dmr.plan_name is PlanName.FILE
    num_micro_batches = spec.pipeline.micro_batches
    others = {
        COMPILE_OFF: spec.runtime.compile != "Off",
        WAY_IN_PATH: has_file and WAY not in spec.detection.dmr.plan,
        EVEN_MICRO_BATCHES: has_file and num_micro_batches > 1 and num_micro_batches % 2 == 1,
        REPLAY_GRADIENTS: spec.snapshots.enabled and spec.snapshots.replay == "Boundary",
    }
    wanted = [right for right, is_other in others.items() if is_other]
    if wanted:
        raise InvalidSpecError(path, f"is Swapped, {swapped_only_with(*wanted)}")
    workload = spec.workload
    if workload.entrypoint in model_sizes.BUILT_IN:
        blocks = model_sizes.blocks_of(workload.entrypoint, workload.config)
        if stages > len(blocks) or stages * len(blocks) ** 2 > model_sizes.MAX_CUTS:
            return  # the trainers tell
        cuts = cut_blocks([block.cost for block in blocks], stages, spec.pipeline.resolved_cut)
        problem = tell_unlike_twins(blocks, cuts)
        if problem:
            raise InvalidSpecError(path, f"is Swapped, but {problem}")


def _check_settings(spec: TrainingJobSpec) -> None:
    dmr = spec.detection.dmr
    if dmr.waiting_bytes > MAX_WAITING_BYTES:
        raise InvalidSpecError(
            "spec.detection.dmr.memory",
            f"is {quote(dmr.memory)}, must be at most what the device has beside the training, and "
            f"{MAX_WAITING_BYTES} in any case",
        )
    if spec.runtime.device == "CPU" and spec.runtime.backend == "NCCL":
        raise InvalidSpecError(
            "spec.runtime.backend", "is NCCL, which needs CUDA; use Gloo or Auto with device CPU"
        )
    if spec.runtime.compile == "Blocks" and spec.parallelism.ranks_per_stage > 1:
        raise InvalidSpecError(
            "spec.runtime.compile",
            "is Blocks, but blocks that are spread over several ranks are not compiled; use Off "
            "with parallelism.ranksPerStage above 1",
        )
    if spec.workload.entrypoint in model_sizes.BUILT_IN:
        model_sizes.check_config(spec.workload.entrypoint, spec.workload.config)
        model_sizes.check_ranks(spec.workload.entrypoint, spec.parallelism.ranks_per_stage)
    detection = spec.detection
    if spec.runtime.compile == "Blocks" and detection.dmr.mode != "Off":
        raise InvalidSpecError(
            "spec.detection.dmr.mode",
            f"is {detection.dmr.mode}, but of compiled blocks the operators are not seen; use "
            "runtime.compile Off, or mode Off",
        )
    _check_dmr(spec)
    _check_witness(spec)
    least = 3 * detection.heartbeat_seconds
    if detection.heartbeat_timeout_seconds < least:
        raise InvalidSpecError(
            "spec.detection.heartbeatTimeoutSeconds",
            f"is {detection.heartbeat_timeout_seconds}, must be at least {least}: three times "
            "heartbeatSeconds, so that one late heartbeat is no fault",
        )
    recovery = spec.recovery
    if spec.checkpoint.problem_of_version:
        raise InvalidSpecError("spec.checkpoint.resumeVersion", spec.checkpoint.problem_of_version)
    check_approximate(
        recovery,
        spec.checkpoint,
        stages=spec.parallelism.stages,
        in_order=spec.pipeline.resolved_order is Order.IN_ORDER,
    )
    if recovery.hold_back_seconds > recovery.hold_back_max_seconds:
        raise InvalidSpecError(
            "spec.recovery.holdBackMaxSeconds",
            f"is {recovery.hold_back_max_seconds}, must be at least holdBackSeconds "
            f"({recovery.hold_back_seconds}), which it bounds",
        )
    scheduling = spec.scheduling
    if scheduling.spread_topology_key and (
        scheduling.spread_topology_key == scheduling.replica_topology_key
    ):
        raise InvalidSpecError(
            "spec.scheduling.spreadTopologyKey",
            "is the same label as replicaTopologyKey, and pods cannot be kept together and apart "
            "by one label; use another one",
        )


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the model at a path, as the user writes them."""
    model: type[pydantic.BaseModel] = TrainingJob
    for part in loc:
        for name, field in model.model_fields.items():
            if part in (field.alias, name):
                candidates = (field.annotation, *typing.get_args(field.annotation))
                model = next(
                    (c for c in candidates if isinstance(c, type) and issubclass(c, Section)), model
                )
    return [field.alias or name for name, field in model.model_fields.items()]


def _check_dmr(spec: TrainingJobSpec) -> None:
    dmr = spec.detection.dmr
    if dmr.mode == "Piggyback" and not spec.runtime.recompute:
        raise InvalidSpecError(
            "spec.detection.dmr.mode",
            "is Piggyback, but without runtime.recompute no forward is executed again; set "
            "runtime.recompute, or use Full",
        )
    if dmr.plan != "Naive" and dmr.mode != "Full":
        raise InvalidSpecError(
            "spec.detection.dmr.plan",
            f"is {dmr.plan}, but no check waits in this mode; use Naive, or mode Full",
        )
    if dmr.memory != "Auto" and dmr.plan == "Naive":
        raise InvalidSpecError(
            "spec.detection.dmr.memory",
            "is for checks that wait; use another plan than Naive, or leave it out",
        )
