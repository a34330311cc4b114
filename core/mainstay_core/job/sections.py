"""Defines the sections of a TrainingJob: one model per group of fields, with defaults and bounds.

:mod:`mainstay_core.job.spec` puts them together and checks what concerns several. The text under a
field is its description in ``kubectl explain``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
import pydantic.alias_generators

from mainstay_core.base.bounds import MAX_BUCKET_BYTES, MAX_COPY_BYTES, MIN_COPY_BYTES
from mainstay_core.base.shape import Cut, Order
from mainstay_core.job.config import (
    BUCKET_BYTES,
    COPY_BYTES,
    MAX_GUARDS,
    MAX_SNAPSHOT_DOMAINS,
    MAX_SNAPSHOT_PEERS,
    SNAPSHOT_DOMAINS,
    SNAPSHOT_PEERS,
)
from mainstay_core.job.types import (
    AbsolutePath,
    Amounts,
    Config,
    Degree,
    Entrypoint,
    IntOrAuto,
    LabelKey,
    NotNegative,
    ObjectName,
    Percent,
    Positive,
    QuantityOrAuto,
    Seconds,
    SecondsOrNone,
    Seed,
    SmallDegree,
    TrainingJobName,
)

MAX_AUTO_SHARDS_PER_LANE = 16
"""With 16, a step after one loss among 64 lanes is 1.06x; more types cost more than they win."""
MAX_ARGS = 256
MEBIBYTE = 1024 * 1024
DEFAULT_MANAGER = "mainstay.dev/operator"
"""``managedBy`` of the jobs that Mainstay's own operator takes care of."""


class Section(pydantic.BaseModel):
    """A group of fields: camelCase on the wire, nothing unknown, nothing converted."""

    model_config = pydantic.ConfigDict(
        alias_generator=pydantic.alias_generators.to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )


class Metadata(Section):
    """Kubernetes owns this part: what it adds besides the name is accepted and left alone."""

    model_config = pydantic.ConfigDict(extra="ignore")

    name: TrainingJobName
    """RFC 1035 label of at most 40 characters."""
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Training(Section):
    """What the job computes. It identifies the job: changing any of it makes another job."""

    steps: Positive
    """Optimizer steps of the whole job."""
    seed: Seed = 0
    """Seed of the initial parameters, the data's order and every random draw."""
    lanes: Degree
    """Equal shares of a step's batch: a replica computes one or more of them, so there are never
    more replicas than lanes. It decides the bits, and so it cannot change later."""
    shards_per_lane: IntOrAuto = "Auto"
    """Parts of a lane's share, called shard types. When a replica is lost, the others take over its
    shard types. Auto: the fewest that spread a lost lane evenly over the others, lanes - 1, at most
    16."""

    @property
    def resolved_shards_per_lane(self) -> int:
        """Number of shard types per lane, Auto resolved from the lanes alone."""
        if self.shards_per_lane == "Auto":
            return max(1, min(MAX_AUTO_SHARDS_PER_LANE, self.lanes - 1))
        return self.shards_per_lane


class Parallelism(Section):
    """How many ranks serve the job, and in what arrangement. Replicas can be changed while the job
    runs, the rest cannot.
    """

    replicas: Degree | None = None
    """Replicas wanted, within minReplicas..lanes; as many as lanes when left out. Can be changed
    while the job runs, also by kubectl scale: the bits stay the same."""
    min_replicas: Degree = 1
    """Replicas with which the job may start when not all pods came in time; the fewest that it can
    be scaled to. Can be changed while the job runs."""
    stages: SmallDegree = 1
    """Pipeline stages of a replica."""
    ranks_per_stage: SmallDegree = 1
    """Ranks of a cell: the size of the inner mesh that the workload's blocks are spread over."""
    ranks_per_pod: SmallDegree = 1
    """Slots of a pod; its loss is one fault."""


class Pipeline(Section):
    """How the model is cut into stages, and the order of work inside a replica. In order, neither
    cut nor stages change the bits.
    """

    schedule: Literal["1F1B"] = "1F1B"
    """The order of forward and backward work. 1F1B: one forward, one backward."""
    micro_batches: Degree = 1
    """Micro-batches of one shard type."""
    order: Literal["InOrder", "Swapped"] = "InOrder"
    """The order in which a micro-batch visits the stages. Swapped: half of the micro-batches pass
    the first two stages, and the last two, the other way round, so that these learn to do each
    other's work (CheckFree+). It decides the bits, and with it cut and stages do. Needs two stages
    or more, whose ends have layers like those of the stages beside them, two micro-batches or more
    in a step, and a model that comes as blocks. Not with runtime.compile Blocks or snapshots.replay
    Boundary. A path as detection.dmr.plan must have {way} in it then, and takes one micro-batch or
    an even number."""
    cut: Literal["Balanced", "Equal"] | None = None
    """How the model is cut into stages. Balanced: the dearest stage is as cheap as possible.
    Equal: stages get equal numbers of layers, or numbers that differ by one. Balanced when left
    out; Equal with order Swapped."""

    @property
    def resolved_order(self) -> Order:
        """``order`` as the job's shape has it."""
        return Order(self.order)

    @property
    def resolved_cut(self) -> Cut:
        """``cut``, the default resolved."""
        if self.cut is not None:
            return Cut(self.cut)
        return Cut.BALANCED if self.resolved_order is Order.IN_ORDER else Cut.EQUAL


class Workload(Section):
    """The user's code."""

    entrypoint: Entrypoint
    """Where the workload comes from: module:function, or path/to/file.py:function with a path in
    the trainer's image (in local mode: beside the job's file)."""
    args: Annotated[
        tuple[Annotated[str, pydantic.Field(max_length=4096)], ...],
        pydantic.Field(strict=False, max_length=MAX_ARGS),
    ] = ()
    """Given to the entrypoint as they are."""
    config: Config = {}
    """Given to the entrypoint as it is, which checks its fields; those of a built-in model are
    checked before anything starts."""


class Runtime(Section):
    """How the ranks compute and talk: settings independent of each other."""

    device: Literal["Auto", "CPU", "CUDA"] = "Auto"
    """Where ranks compute. Auto is CUDA where there is one."""
    backend: Literal["Auto", "Gloo", "NCCL"] = "Auto"
    """How ranks talk. Auto is NCCL when every rank has a CUDA device of its own, else Gloo; in a
    local run of several pods, which share the machine's devices, it is Gloo."""
    compile: Literal["Off", "Blocks"] = "Off"
    """Whether blocks run as code of torch's compiler. Blocks: each by itself. A trainer first
    compiles each kind of block and compares the bits of two runs, tens of seconds before it takes
    part (see scheduling.startupDeadlineSeconds). Blocks need a C++ compiler on a CPU and Triton on
    a GPU, and one rank to a stage. It decides the bits."""
    recompute: bool = False
    """Run each block's forward again in the backward instead of keeping what it saved, one block
    at a time. The stage before waits longer for its gradient. It never changes the bits."""
    recompute_share: Annotated[float, pydantic.Field(ge=0.01, le=1)] = 1.0
    """Share of each stage's blocks that recompute applies to: the first ones, rounded up to whole
    blocks. The others keep what they saved. It means nothing without recompute, and never changes
    the bits."""
    bucket_mebibytes: Annotated[int, pydantic.Field(ge=1, le=MAX_BUCKET_BYTES // MEBIBYTE)] = (
        BUCKET_BYTES // MEBIBYTE
    )
    """How much of a stage's gradient is exchanged and summed at a time, while its neighbours are on
    their way. Scratch of a rank: four buckets at most, and where a cell sends several partials two
    more for each further one and one besides. It never changes the bits."""
    connect_seconds: Seconds = 10
    """How long a group of ranks may take to connect once all of them are there. One that takes
    longer is given up, and the ranks meet again. More than 10 where many GPUs meet over NCCL."""

    @property
    def recomputed(self) -> float:
        """Share of a stage's blocks that run their forward again; 0: none does."""
        return self.recompute_share if self.recompute else 0.0

    @property
    def bucket_bytes(self) -> int:
        """``bucketMebibytes`` in bytes."""
        return self.bucket_mebibytes * MEBIBYTE


class ContainerResources(Section):
    """Requests and limits of a container, as in a pod."""

    requests: Amounts = {}
    """What a node must have free for it, e.g. {cpu: 100m, memory: 128Mi}."""
    limits: Amounts = {}
    """What it may use at most. A namespace whose quota counts limits asks for them."""


class Supervisor(Section):
    """What runs beside the trainers in each pod of a cluster."""

    resources: ContainerResources | None = None
    """Requests and limits of the supervisor, and of the container that copies Mainstay's package
    before it begins; the operator's own setting when left out. Can be changed: new pods have it."""


class Spares(Section):
    """Standby pods without a rank: one of them takes a lost pod's place at once. Can be changed
    while the job runs.
    """

    replicas: Annotated[int, pydantic.Field(ge=0, le=65_536)] = 0
    """Number of standby pods."""
    mode: Literal["Warm"] = "Warm"
    """What a standby pod has ready. Warm: it is registered, with torch imported."""


class Checkpoint(Section):
    """Durable copies of the state."""

    storage: AbsolutePath | None = None
    """A directory that all pods see: in a cluster a volume that the template mounts, needed when
    everySteps is not 0. Local mode chooses one in the job's state directory when left out."""
    every_steps: NotNegative = 0
    """A checkpoint each time that so many steps are applied since the newest, and one of the
    last step. 0 switches durable checkpoints off."""
    keep: Annotated[int, pydantic.Field(ge=2, le=10_000)] = 2
    """Complete checkpoints that are kept. At least two: the newest may turn out to be damaged."""
    copy_mebibytes: Annotated[
        int, pydantic.Field(ge=MIN_COPY_BYTES // MEBIBYTE, le=MAX_COPY_BYTES // MEBIBYTE)
    ] = COPY_BYTES // MEBIBYTE
    """Host memory of a rank for the copy of its state while it is written; a smaller state takes
    less. Of a larger state the rest is copied as the storage takes what was copied before, and the
    next step waits, before it applies, until all is copied: for half of detection.hangSeconds at
    most, then the checkpoint is given up."""
    resume_from: AbsolutePath | None = None
    """Directory of an earlier run's checkpoints: go on from the newest good one. Replicas, stages
    and slots per pod may differ. Only read, never changed."""
    resume_version: Positive | None = None
    """With resumeFrom: go on from this step's checkpoint alone, though there are newer ones; as
    from the newest exact one of a job that is approximate since then."""
    key_secret: ObjectName | None = None
    """A Secret of the job's namespace, whose entry ``key`` signs checkpoints: one that is not
    signed by it is not read. Further lines of the entry are older keys, which only check. Local
    mode takes the key from the file that MAINSTAY_CHECKPOINT_KEY_FILE names."""

    @property
    def problem_of_version(self) -> str:
        """What is wrong with ``resumeVersion`` beside the other fields; empty if nothing is."""
        if self.resume_version is None:
            return ""
        if self.resume_from is None:
            return "is for jobs that go on from an earlier run; name its checkpoints in resumeFrom"
        if self.storage == self.resume_from:
            return (
                "goes back in the directory that is the job's own storage, too; give the job "
                "another storage, as newer checkpoints in its own count"
            )
        return ""

    @property
    def copy_bytes(self) -> int:
        """``copyMebibytes`` in bytes."""
        return self.copy_mebibytes * MEBIBYTE


class Snapshots(Section):
    """Copies of the state in the memory of pods, spread over several steps, with logs of the steps
    since. From them a stage that nobody holds any more is made anew, without a lost
    step.
    """

    enabled: bool = False
    """Whether the state is kept in the memory of pods."""
    window: IntOrAuto = "Auto"
    """Steps over which a copy of the whole state is spread, at most 1024, and at most as many as
    the stage with the most parts that are copied by themselves has of them: layers, and each expert
    of a mixture. A longer one takes less of each step, more memory, and more time to make a state
    anew. Auto: as few as can be copied beside the training, at most 16."""
    peers: Annotated[int, pydantic.Field(ge=0, le=MAX_SNAPSHOT_PEERS)] = SNAPSHOT_PEERS
    """Other pods that keep each part as well, spares among them. With 0 a part is lost with the pod
    that wrote it."""
    ordering: Literal["Popularity", "SoftCount", "TimeDecayed", "CapacityAware", "BackToFront"] = (
        "Popularity"
    )
    """Order in which the parts of the model are copied. BackToFront: the last layers first; so it
    is for every model without experts. The others copy experts first: those that fewest tokens
    reach (Popularity), whose gates have the least sum of probabilities (SoftCount; the built-in
    mixture counts it with ``counts: probabilities``), with the least moving average of tokens
    (TimeDecayed), or with the fewest tokens for their capacity (CapacityAware; the model must say
    it)."""
    decay_percent: Percent = 50
    """How much of the moving average of TimeDecayed stays in each step."""
    replay: Literal["Auto", "Gradients", "Boundary"] = "Auto"
    """How a lost state is made anew. Gradients: its newest copies, then the optimizer alone with
    the gradients of the steps since. Boundary: the lost stages compute their steps again with what
    crossed the boundaries to the stages beside them; no own loops. Auto: the one that adds fewer
    bytes a step, of those that cover what may be lost. With several lanes or ranks to a stage, and
    for a model of your own, that is Gradients. `mainstay local run FILE --dry-run` says what a job
    has, and why."""
    memory: QuantityOrAuto = "Auto"
    """Memory of each pod for copies and logs, those of its own ranks and of other pods, e.g.
    8Gi; in a cluster it is added to the supervisor's requests and limits. Auto: what a complete
    copy, one in the making and the logs take while one replica is missing, and a quarter more.
    Of a model of your own that is not known before it runs: give an amount."""


class Protection(Section):
    """How far apart the copies of the state are kept."""

    domains: Annotated[int, pydantic.Field(ge=1, le=MAX_SNAPSHOT_DOMAINS)] = SNAPSHOT_DOMAINS
    """Failure domains (nodes; pods on one machine) over which the copies of each part of a snapshot
    are spread, as far as there are as many. At most the job's pods."""


class RepairWindow(Section):
    """The budget of repairs: pods that died and are made again. Pods that were preempted, drained
    or deleted on purpose do not count. Once it is used up, places stay empty, the job goes on with
    what it has, and the condition Degraded says so, until the window has moved on.
    """

    seconds: Seconds = 3600
    """Repairs of the last so many seconds count."""
    max_repairs: IntOrAuto = "Auto"
    """Repairs within the window. Auto: twice the job's pods, at least 10."""


class Quarantine(Section):
    """What happens to a node whose devices computed wrongly again and again: parameters of its pods
    differed from those of the majority of their stage, for which a stage needs three cells or more,
    or a check (detection.dmr) found two executions of an operator that differ. A node stays in
    quarantine until trustedNodes names it, or mode is Off. In clusters only; can be changed while
    the job runs.
    """

    mode: Literal["Off", "DryRun", "Avoid", "Taint"] = "Off"
    """Off: nothing. DryRun: an Event that names the node and says what would be done. Avoid: the
    job's pods on the node hand their work over, and new ones stay off it. Taint: besides, the node
    gets the taint mainstay.dev/quarantine:NoSchedule, for everybody (the operator must be allowed
    to patch nodes)."""
    after_mismatches: Annotated[int, pydantic.Field(ge=1, le=1000)] = 2
    """Mismatches of one node within the window before anything happens."""
    window_seconds: Seconds = 86_400
    """Mismatches of the last so many seconds count."""
    max_nodes_percent: Percent = 10
    """The quarantine holds at most so many of the job's nodes, rounded down, and at least one node;
    with 0 it holds none. Beyond that there is only the Event."""
    trusted_nodes: Annotated[
        tuple[ObjectName, ...], pydantic.Field(strict=False, max_length=256)
    ] = ()
    """Nodes that somebody has looked at: they come out of quarantine, and do not come into it again
    while they are named here. A taint stays until somebody removes it."""


class ApproximateRecovery(Section):
    """How a stage whose every copy is gone is made anew from its neighbours."""

    weights: Literal["GradientNorm", "Uniform", "Copy"] = "GradientNorm"
    """How much of each neighbour is taken. GradientNorm: by the squared norms of their gradients in
    the last step. Uniform: one half each. Copy: the stage before alone."""
    lr_boost_percent: Annotated[int, pydantic.Field(ge=100, le=10_000)] = 110
    """Learning rate of what was made anew, in percent of the schedule's. Other stages keep
    theirs."""
    boost_steps: Positive | None = None
    """Steps for which that lasts. Left out: to the job's end."""
    guards: Annotated[int, pydantic.Field(ge=0, le=MAX_GUARDS)] | None = None
    """Cells of the stage beside each end of a swapped pipeline that keep what the end alone has
    (its embedding, its head), with the optimizer's state, so that it comes back exactly: in
    different failure domains, where there are such. Each step sends each of them the gradient of
    these blocks, with allowApproximate off as well, since a person may allow one recovery. At most
    spec.training.lanes, as there is one cell for each replica; where replicas are fewer, as after a
    scale-down, as many serve as there are. Left out: 2 with pipeline.order Swapped, else 0. Not
    with several ranks to a stage: an end that has what the stage beside it lacks is made anew only
    of its own checkpoint (staleSteps) there. With snapshots in memory there are 0 unless more are
    asked for, and pods keep no copy of what guards have."""
    stale_steps: NotNegative | None = None
    """A checkpoint of the lost stage that is at most so many steps old is loaded by it alone, with
    its moments, while the other stages stay where they are. That goes before its neighbours, and is
    the only way for two lost stages side by side, and in order for the first and the last stage. An
    end that guards keep is made of them and its twin all the same. It takes checkpoint.everySteps,
    and approximateAfterLostSteps, without which all go back to a checkpoint. Left out: 100 where
    both are set, and for what a person allows where checkpoint.everySteps is, since a copy of that
    age was measured to cost next to nothing and neighbours much more (docs/benchmarks.md), else 0.
    0: no stage goes back alone. An inner stage is then made of its neighbours, an end of a swapped
    pipeline of its twin and its guards, and for all else the whole job goes back to its newest
    checkpoint, or to the seed."""
    wait_seconds: SecondsOrNone = 0
    """How long the job waits, before it makes a stage anew, for a pod with the stage's exact state
    that has only fallen silent: it may be cut off, or stopped. If it is heard meanwhile, the job
    stays exact. Pods that surely ended are not waited for. 0: it does not wait. With snapshots
    these are tried first, by another trainer, and then nothing waits: a pod that is heard before
    they are found incomplete is taken back."""
    optimizer_state: Literal["Zero", "Average"] = "Zero"
    """The optimizer's state of what is made of other stages. Zero: it begins from nothing. Average:
    it is the average of theirs, by the same weights; what counts a parameter's steps is the
    smallest of theirs, and where these differ and one is below 1000, it begins from nothing all the
    same. The copy of a neighbour then has all of its state, several times the bytes of its
    parameters."""


class RecoveryPolicy(Section):
    """What a recovery may do. Rows of the ladder that cannot be executed yet are not offered."""

    allow_approximate: bool = False
    """Whether a stage whose every copy is gone may be made anew from its neighbours: the job loses
    no step, but goes on in another way than it would have (approximately). It is for pipelines of
    three stages and more, and of two with pipeline.order Swapped or a checkpoint of their own. The
    first and the last stage need Swapped and guards, or a checkpoint of their own
    (approximateAfterLostSteps below approximate.staleSteps). With snapshots in memory, these are
    tried first: what they bring back is exact. It holds from the next loss on; where it is off, a
    person may allow one recovery (kubectl mainstay approximate), by the rules of approximate."""
    approximate_after_lost_steps: NotNegative | None = None
    """With allowApproximate: a stage is made anew rather than have the job lose more steps than
    this. Left out: rather than begin from the seed after step 100, but never in place of a
    checkpoint. It has no effect while allowApproximate is off: a recovery that a person allows goes
    by what that person wants."""
    approximate: ApproximateRecovery = ApproximateRecovery()
    on_taint: Literal["Report", "Restart"] = "Report"
    """What happens with the steps that a device has computed since a witness agreed with it last,
    once others show that it computes wrongly each time. Report: status, finding and report say
    which steps are tainted, and the job goes on. Restart: as soon as it can do without the device,
    the job goes back to the newest checkpoint that is no later than that witness, or to the seed,
    and computes the steps again. Checkpoints of tainted steps are put aside, and stay on the
    disk."""
    on_hosts_lost: Literal["Rehost"] = "Rehost"
    """What happens when all hosts of a shard type are lost. Rehost: others host it from then on."""
    max_restarts: Annotated[int, pydantic.Field(ge=0, le=1_000_000)] = 10
    """Restarts of one slot's trainer until it works again; then it stays down. It works again when
    it has committed two steps that its slot had not committed before: steps that are computed again
    do not count. When the same exception ends more tries than this of the same step, on whichever
    slots, the job fails with it."""
    escalate_after: Annotated[int, pydantic.Field(ge=1, le=1_000_000)] = 10
    """How often a quorum may end for the same cause (kind of fault, source, witnesses) before more
    is done than to meet again: after so often the job goes on without the source, after twice as
    often without the witnesses, after three times as often all restart from the newest checkpoint,
    after four times as often the job fails with the cause. Each meeting waits longer, up to 10 s.
    Two steps committed in a row end the count. Waiting for trainers is not counted."""
    restart_grace_seconds: SecondsOrNone = 10
    """How long a lost rank's place waits for its own pod's new trainer before a spare takes it."""
    handover_seconds: SecondsOrNone = 30
    """How long a pod that is told to end (SIGTERM) serves on until its work is handed over. In a
    cluster the pod's terminationGracePeriodSeconds must be larger. 0: it ends at once."""
    hold_back_seconds: SecondsOrNone = 1
    """How long a trainer that has ended twice in a row, with no step committed in between, is not
    let in; twice as long after each further end. Counted per slot and per failure domain."""
    hold_back_max_seconds: Seconds = 300
    """The longest time for which a trainer is not let in, however often it has ended."""
    window: RepairWindow = RepairWindow()
    quarantine: Quarantine = Quarantine()


class Scheduling(Section):
    """How the job gets its pods."""

    startup_deadline_seconds: Seconds = 120
    """How long the job waits at its start for all of its pods. Then it starts with those that are
    there, if they make minReplicas. Else a local run fails; in a cluster the job waits on, until
    activeDeadlineSeconds."""
    replica_topology_key: LabelKey | None = None
    """Label of nodes, e.g. topology.kubernetes.io/rack: the chain of cells that forms a replica is
    kept within one value of it where that is possible, since its stages talk most."""
    spread_topology_key: LabelKey | None = None
    """Label of nodes, e.g. kubernetes.io/hostname: pods are spread over its values, and copies of
    a stage are kept in different ones where that is possible, so that one loss leaves another
    copy."""
