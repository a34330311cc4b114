"""Defines the rules in CEL by which an API server checks a TrainingJob beyond single fields.

Each rule stands at the section that it is about. :mod:`mainstay_core.job.spec` checks the rules
about one moment as well, for local mode and the api; of pipelines and permission both have the same
sentences (:mod:`mainstay_core.job.sentences`). Rules about a change (``oldSelf``) are checked
here alone. What identifies a job, and what its agents were told when it began, never changes. To
change it, make another job.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstay_core.base.bounds import MAX_MEMBERS, MAX_TYPES
from mainstay_core.dmr.settings import WAY
from mainstay_core.dmr.witness import MIN_CHAINS
from mainstay_core.job.config import MAX_SNAPSHOT_WINDOW, STALE_STEPS
from mainstay_core.job.sentences import (
    COMPILE_OFF,
    EVEN_MICRO_BATCHES,
    GUARDS_IN_ORDER,
    GUARDS_OF_SEVERAL_RANKS,
    ONE_MICRO_BATCH_SWAPPED,
    ONE_STAGE_SWAPPED,
    REPLAY_GRADIENTS,
    STALE_WITHOUT_CHECKPOINTS,
    TOO_MANY_GUARDS,
    TWO_ENDS_BESIDE_SNAPSHOTS,
    TWO_ENDS_OF_SEVERAL_RANKS,
    WAY_IN_PATH,
    no_neighbours,
    swapped_only_with,
)

SPEC = "spec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of the CRD.

    Args:
        section: path of the section that is ``self``; empty for the whole object.
        field: what is to blame, within the section, e.g. ``.backend``; empty: the section.
        rule: in CEL, true if all is well.
        message: what would be right. Without the values: the server takes a message
            made of numbers for too dear, however short they are.
        forbidden: it is a change that is refused, not a value.
    """

    section: str
    field: str = ""
    rule: str
    message: str
    forbidden: bool = False

    def to_schema(self) -> dict[str, str]:
        """Return the rule as an item of ``x-kubernetes-validations``."""
        item = {"rule": self.rule, "message": self.message}
        if self.field:
            item["fieldPath"] = self.field
        item["reason"] = "FieldValueForbidden" if self.forbidden else "FieldValueInvalid"
        return item


def _constant(section: str, field: str, *, optional: bool = False) -> Rule:
    """Return the rule that a field of a section never changes."""
    unchanged = f"self{field} == oldSelf{field}"
    if optional:
        absent = f"!has(self{field}) && !has(oldSelf{field})"
        both = f"has(self{field}) && has(oldSelf{field})"
        unchanged = f"{absent} || {both} && {unchanged}"
    return Rule(
        section=section,
        field=field,
        rule=unchanged,
        message="cannot be changed: it is part of what the job is, or its pods were told at the "
        "start; make another job",
        forbidden=True,
    )


_REPLICAS = "(has(self.parallelism.replicas) ? self.parallelism.replicas : self.training.lanes)"
_NUM_RANKS = f"{_REPLICAS} * self.parallelism.stages * self.parallelism.ranksPerStage"

_ORDER, _PERMISSION = ".pipeline.order", ".recovery.allowApproximate"
_GUARDS = ".recovery.approximate.guards"
_IN_ORDER = "self.pipeline.order == 'InOrder'"
_STALE = ".recovery.approximate.staleSteps"
_HAS_STALE = (
    f"(has(self{_STALE}) ? self{_STALE} > 0 : "
    "has(self.recovery.approximateAfterLostSteps) && self.checkpoint.everySteps > 0)"
)
"""True where the rules give a lost stage a checkpoint of its own: what
:func:`mainstay_core.job.approximation.resolve_stale_steps` says."""
_LIMIT = ".recovery.approximateAfterLostSteps"
_LOADS_ALONE = (
    f"has(self{_LIMIT}) && (has(self{_STALE}) ? self{_LIMIT} < self{_STALE} : "
    f"self.checkpoint.everySteps > 0 && self{_LIMIT} < {STALE_STEPS})"
)
"""True where one ever does: what :func:`mainstay_core.job.approximation.loads_alone` says."""
_HAS_GUARDS = f"has(self{_GUARDS})"
_NO_GUARDS = f"!{_HAS_GUARDS} || self{_GUARDS} == 0"
_PLAN = "self.detection.dmr.plan"
_EVEN = "self.pipeline.microBatches == 1 || self.pipeline.microBatches % 2 == 0"
_TWO_ENDS = (
    f"!self{_PERMISSION} || {_HAS_GUARDS} || {_LOADS_ALONE} || {_IN_ORDER} || "
    "self.parallelism.stages != 2"
)
"""True where neither of two swapped stages lacks what guards or a checkpoint of its own give."""

PIPELINE: tuple[Rule, ...] = (
    Rule(
        section=SPEC,
        field=_STALE,
        rule=f"!{_HAS_STALE} || self.checkpoint.everySteps > 0",
        message=f"is above 0, but {STALE_WITHOUT_CHECKPOINTS}",
    ),
    Rule(
        section=SPEC,
        field=_PERMISSION,
        rule=f"!self{_PERMISSION} || self.parallelism.stages > 1",
        message=f"is true, but {no_neighbours(1, keeps_checkpoints=True)}",
    ),
    *(
        Rule(
            section=SPEC,
            field=_PERMISSION,
            rule=f"!self{_PERMISSION} || self.parallelism.stages != 2 || !({_IN_ORDER}) || "
            f"{_LOADS_ALONE} || self.checkpoint.everySteps {other}",
            message=f"is true, but {no_neighbours(2, keeps_checkpoints=keeps)}",
        )
        for keeps, other in ((False, "> 0"), (True, "== 0"))
    ),
    Rule(
        section=SPEC,
        field=_PERMISSION,
        rule=f"{_TWO_ENDS} || self.parallelism.ranksPerStage > 1 || !self.snapshots.enabled",
        message=f"is true, but {TWO_ENDS_BESIDE_SNAPSHOTS}",
    ),
    Rule(
        section=SPEC,
        field=_PERMISSION,
        rule=f"{_TWO_ENDS} || self.parallelism.ranksPerStage == 1",
        message=f"is true, but {TWO_ENDS_OF_SEVERAL_RANKS}",
    ),
    Rule(
        section=SPEC,
        field=_ORDER,
        rule=f"{_IN_ORDER} || self.parallelism.stages > 1",
        message=f"is Swapped, but {ONE_STAGE_SWAPPED}",
    ),
    Rule(
        section=SPEC,
        field=_ORDER,
        rule=f"{_IN_ORDER} || self.training.lanes > 1 || self.pipeline.microBatches > 1 || "
        "type(self.training.shardsPerLane) == int && self.training.shardsPerLane > 1",
        message=f"is Swapped, but {ONE_MICRO_BATCH_SWAPPED}",
    ),
    *(
        Rule(
            section=SPEC,
            field=_ORDER,
            rule=f"{_IN_ORDER} || {fits}",
            message=f"is Swapped, {swapped_only_with(wanted)}",
        )
        for wanted, fits in (
            (COMPILE_OFF, "self.runtime.compile == 'Off'"),
            (WAY_IN_PATH, f"!{_PLAN}.startsWith('/') || {_PLAN}.contains('{WAY}')"),
            (EVEN_MICRO_BATCHES, f"!{_PLAN}.startsWith('/') || {_EVEN}"),
            (
                REPLAY_GRADIENTS,
                "!self.snapshots.enabled || self.snapshots.replay != 'Boundary'",
            ),
        )
    ),
    Rule(
        section=SPEC,
        field=_GUARDS,
        rule=f"{_NO_GUARDS} || !({_IN_ORDER})",
        message=f"is above 0, but {GUARDS_IN_ORDER}",
    ),
    Rule(
        section=SPEC,
        field=_GUARDS,
        rule=f"{_NO_GUARDS} || {_IN_ORDER} || self.parallelism.ranksPerStage == 1",
        message=f"is above 0, but {GUARDS_OF_SEVERAL_RANKS}",
    ),
    Rule(
        section=SPEC,
        field=_GUARDS,
        rule=f"{_NO_GUARDS} || self{_GUARDS} <= self.training.lanes",
        message=f"is above the lanes, but {TOO_MANY_GUARDS}",
    ),
)
"""Rules about the order of a pipeline, permission to make its stages anew, and guards of its ends:
each in the model's words. The model alone knows what layers the stages have."""

CROSS_FIELD: tuple[Rule, ...] = (
    Rule(
        section="",
        field=".metadata.name",
        rule=r"self.metadata.name.matches(r'^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$')",
        message="must be at most 40 lower-case letters, digits and '-', starting with a letter and "
        "ending with a letter or digit: pods are named after the job",
    ),
    Rule(
        section=SPEC,
        field=".parallelism.replicas",
        rule="!has(self.parallelism.replicas) || self.parallelism.replicas <= self.training.lanes",
        message="must be at most spec.training.lanes: a lane has at most one replica",
    ),
    Rule(
        section=SPEC,
        field=".parallelism.minReplicas",
        rule=f"self.parallelism.minReplicas <= {_REPLICAS}",
        message="must be at most the replicas: parallelism.replicas, or training.lanes where "
        "that is left out",
    ),
    Rule(
        section=SPEC,
        field=".parallelism.ranksPerPod",
        rule=f"self.parallelism.ranksPerPod <= {_NUM_RANKS}",
        message="must be at most the number of ranks: replicas x stages x ranksPerStage",
    ),
    Rule(
        section=SPEC,
        field=".parallelism",
        rule=f"{_NUM_RANKS} <= {MAX_MEMBERS}",
        message=f"makes too many ranks (replicas x stages x ranksPerStage): a plan has at most "
        f"{MAX_MEMBERS}",
    ),
    Rule(
        section=SPEC,
        field=".training.shardsPerLane",
        rule="type(self.training.shardsPerLane) != int || "
        f"self.training.lanes * self.training.shardsPerLane <= {MAX_TYPES}",
        message=f"makes too many shard types (lanes x shardsPerLane): a step has at most "
        f"{MAX_TYPES}",
    ),
    Rule(
        section=SPEC,
        field=".redundancy",
        # That there are MAX_HOSTS at most, the model says: an object from before that bound has to
        # stay one whose status can be written and whose finalizers can be taken away.
        rule="type(self.redundancy) != int || self.redundancy <= self.training.lanes",
        message="must be at most spec.training.lanes, or Auto: a shard type has at most one host "
        "per lane",
    ),
    Rule(
        section="spec.runtime",
        field=".backend",
        rule="!(self.device == 'CPU' && self.backend == 'NCCL')",
        message="is NCCL, which needs CUDA; use Gloo or Auto with device CPU",
    ),
    Rule(
        section=SPEC,
        field=".runtime.compile",
        rule="self.runtime.compile == 'Off' || self.parallelism.ranksPerStage == 1",
        message="is Blocks, but blocks that are spread over several ranks are not compiled; use "
        "Off with parallelism.ranksPerStage above 1",
    ),
    Rule(
        section=SPEC,
        field=".detection.dmr.mode",
        rule="self.runtime.compile == 'Off' || self.detection.dmr.mode == 'Off'",
        message="is not Off, but of compiled blocks the operators are not seen; use "
        "runtime.compile Off, or mode Off",
    ),
    Rule(
        section=SPEC,
        field=".detection.dmr.mode",
        rule="self.runtime.recompute || self.detection.dmr.mode != 'Piggyback'",
        message="is Piggyback, but without runtime.recompute no forward is executed again; set "
        "runtime.recompute, or use Full",
    ),
    *PIPELINE,
    Rule(
        section=SPEC,
        field=".detection.witness.everySteps",
        rule=f"self.detection.witness.everySteps == 0 || {_REPLICAS} >= {MIN_CHAINS}",
        message="is above 0, but the job has a single replica, so that nobody else computes the "
        f"same; use 0, or {MIN_CHAINS} replicas or more",
    ),
    Rule(
        section="spec.detection.dmr",
        field=".plan",
        rule="self.plan == 'Naive' || self.mode == 'Full'",
        message="is not Naive, but no check waits in this mode; use Naive, or mode Full",
    ),
    Rule(
        section="spec.detection.dmr",
        field=".memory",
        rule="self.memory == 'Auto' || self.plan != 'Naive'",
        message="is for checks that wait; use another plan than Naive, or leave it out",
    ),
    Rule(
        section="spec.snapshots",
        field=".window",
        rule=f"type(self.window) != int || self.window <= {MAX_SNAPSHOT_WINDOW}",
        message=f"must be at most {MAX_SNAPSHOT_WINDOW} steps, or Auto",
    ),
    Rule(
        section=SPEC,
        field=".snapshots.peers",
        rule="!self.snapshots.enabled || "
        "(self.snapshots.peers - self.spares.replicas) * self.parallelism.ranksPerPod < "
        f"{_NUM_RANKS}",
        message="must be fewer than the job's pods, spares included",
    ),
    Rule(
        section=SPEC,
        field=".protection.domains",
        rule="!self.snapshots.enabled || "
        f"(self.protection.domains - 1 - self.spares.replicas) * self.parallelism.ranksPerPod < "
        f"{_NUM_RANKS}",
        message="must be at most the job's pods, spares included",
    ),
    Rule(
        section="spec.detection",
        field=".heartbeatTimeoutSeconds",
        rule="self.heartbeatTimeoutSeconds >= 3 * self.heartbeatSeconds",
        message="must be at least three times heartbeatSeconds, so that one late heartbeat is no "
        "fault",
    ),
    Rule(
        section="spec.recovery",
        field=".holdBackMaxSeconds",
        rule="self.holdBackSeconds <= self.holdBackMaxSeconds",
        message="must be at least holdBackSeconds, which it bounds",
    ),
    Rule(
        section="spec.scheduling",
        field=".spreadTopologyKey",
        rule="!has(self.replicaTopologyKey) || !has(self.spreadTopologyKey) || "
        "self.replicaTopologyKey != self.spreadTopologyKey",
        message="is the same label as replicaTopologyKey, and pods cannot be kept together and "
        "apart by one label; use another one",
    ),
    Rule(
        section="spec.checkpoint",
        field=".resumeVersion",
        rule="!has(self.resumeVersion) || has(self.resumeFrom)",
        message="is for jobs that go on from an earlier run; name its checkpoints in resumeFrom",
    ),
    Rule(
        section="spec.checkpoint",
        field=".resumeVersion",
        rule="!has(self.resumeVersion) || !has(self.resumeFrom) || !has(self.storage) || "
        "self.storage != self.resumeFrom",
        message="goes back in the directory that is the job's own storage, too; give the job "
        "another storage, as newer checkpoints in its own count",
    ),
)
"""Rules that hold at any moment. :mod:`mainstay_core.job.spec` checks the same."""

CLUSTER_ONLY: tuple[Rule, ...] = (
    Rule(
        section="spec",
        field=".template",
        rule="has(self.template)",
        message="is needed in a cluster: spec.containers with a container whose image has torch; "
        "the one named trainer, or the first, is the trainer",
    ),
    Rule(
        section="spec.checkpoint",
        rule="self.everySteps == 0 || has(self.storage)",
        message="everySteps needs storage in a cluster: the absolute path of a directory that all "
        "pods see, on a volume that spec.template mounts; or use everySteps 0",
    ),
)
"""Rules for clusters only: local mode has a default."""

UNCHANGEABLE: tuple[Rule, ...] = (
    _constant("spec", ".managedBy"),
    _constant("spec", ".priorityClassName", optional=True),
    _constant("spec", ".training"),
    _constant("spec.parallelism", ".stages"),
    _constant("spec.parallelism", ".ranksPerStage"),
    _constant("spec.parallelism", ".ranksPerPod"),
    _constant("spec", ".redundancy"),
    _constant("spec", ".pipeline"),
    _constant("spec", ".workload"),
    _constant("spec", ".runtime"),
    _constant("spec.detection", ".hangSeconds"),
    _constant("spec.detection", ".heartbeatSeconds"),
    _constant("spec.detection", ".heartbeatTimeoutSeconds"),
    _constant("spec", ".checkpoint"),
    _constant("spec", ".snapshots"),
    _constant("spec", ".protection"),
    _constant("spec.recovery.approximate", ".guards", optional=True),
    _constant("spec.recovery", ".maxRestarts"),
    _constant("spec.recovery", ".escalateAfter"),
    _constant("spec.recovery", ".restartGraceSeconds"),
    _constant("spec.recovery", ".handoverSeconds"),
    _constant("spec.recovery", ".holdBackSeconds"),
    _constant("spec.recovery", ".holdBackMaxSeconds"),
    _constant("spec", ".scheduling"),
    Rule(
        section="",
        field=".spec.suspend",
        rule="!self.spec.suspend || oldSelf.spec.suspend || self.spec.checkpoint.everySteps > 0 || "
        "!has(self.status) || !has(self.status.quorum)",
        message="needs a checkpoint to go on from, and spec.checkpoint.everySteps is 0; delete the "
        "job to stop it. A job that has not begun may be suspended without",
        forbidden=True,
    ),
    Rule(
        section="",
        field=".spec.template",
        # A job that still pauses has pods of the template as it is.
        rule="oldSelf.spec.suspend && (!has(oldSelf.status) || !has(oldSelf.status.startTime)) || "
        "!has(self.spec.template) && !has(oldSelf.spec.template) || "
        "has(self.spec.template) && has(oldSelf.spec.template) && "
        "self.spec.template == oldSelf.spec.template",
        message="can be changed while the job is suspended only: set spec.suspend to true first, "
        "and wait until its state is Suspended",
        forbidden=True,
    ),
)
"""Rules about what a change must leave alone. Free to change are suspend, parallelism.replicas and
minReplicas, supervisor.resources, spares, activeDeadlineSeconds, ttlSecondsAfterFinished,
detection.dmr, detection.witness, what recovery may do, recovery.window and
recovery.quarantine."""

RULES = CROSS_FIELD + CLUSTER_ONLY + UNCHANGEABLE
