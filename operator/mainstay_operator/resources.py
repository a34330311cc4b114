"""Names, labels and annotations of what the operator makes, and its view of a TrainingJob."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.ids import JobUid
from mainstay_core.job.object_names import object_name
from mainstay_core.job.pod_templates import check_template
from mainstay_core.job.sections import DEFAULT_MANAGER
from mainstay_core.job.spec import (
    API_VERSION,
    GROUP,
    KIND,
    LABEL_UID,
    TrainingJob,
    parse_training_job,
)
from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_core.pool.repair import RepairPolicy
from mainstay_core.wire.facts import Location

FIELD_MANAGER = "mainstay-operator"
STATUS_MANAGER = "mainstay-operator-status"
FINALIZER = f"{GROUP}/finalizer"
"""Finalizer that the version before put on each job; it is taken away again."""
LABEL_JOB = f"{GROUP}/job-name"
LABEL_INDEX = f"{GROUP}/pod-index"
ENDED_FOR = f"{GROUP}/ended-for"
ENDED_AS = f"{GROUP}/ended-as"
"""Annotation of a pod that the operator itself deletes: why. It is no failure then."""
ANNOTATION_SHM = f"{GROUP}/shared-memory"
"""Annotation of a pod: how large its memory-backed volume may grow, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectNames:
    """The names of what a job has beside its pods."""

    shared: str
    """Of the Service, the ServiceAccount, the PodDisruptionBudget and the NetworkPolicy."""
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A TrainingJob object as the operator uses it."""

    namespace: str
    name: str
    uid: JobUid
    generation: int
    manifest: dict[str, Any]
    """Without what Kubernetes adds: what the api is given."""
    status: dict[str, Any] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    deleted_at_s: float | None = None
    job: TrainingJob | None = None
    """None if the specification cannot be used, and no earlier one is known."""
    invalid: str = ""
    """Why the specification cannot be used as it was written last."""
    template_problem: str = ""
    """Why no pod is made of its template; of a job that has never begun, ``invalid`` says so."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The specification as it was written."""
        spec: Mapping[str, Any] = self.manifest.get("spec") or {}
        return spec

    @property
    def template(self) -> Mapping[str, Any]:
        """The user's pod template."""
        template: Mapping[str, Any] = self.spec.get("template") or {}
        return template

    @property
    def account(self) -> str:
        """The ServiceAccount that the template names for its pods; "" for the job's own."""
        pod = self.template.get("spec") or {}
        return str(pod.get("serviceAccountName") or "")

    @property
    def ours(self) -> bool:
        """Whether this operator is asked to act on it."""
        return bool(self.spec.get("managedBy", DEFAULT_MANAGER) == DEFAULT_MANAGER)

    @property
    def runs(self) -> bool:
        """Whether it has pods, or is to have them again: it has begun, and is not suspended."""
        return bool(self.status.get("startTime"))

    @property
    def suspend(self) -> bool:
        """Whether nobody should compute."""
        return bool(self.spec.get("suspend", False))

    def after(self, before: JobView) -> JobView:
        """Return this view, with the specification of ``before`` if its own cannot be used."""
        if not self.invalid or before.job is None:
            return self
        return replace(self, manifest=before.manifest, job=before.job)

    def owner(self) -> dict[str, Any]:
        """Return the reference by which everything of the job goes with it."""
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    def labels(self) -> dict[str, str]:
        """Return the labels of everything of the job."""
        return {
            "app.kubernetes.io/name": "mainstay",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "trainer",
            "app.kubernetes.io/part-of": "mainstay",
            "app.kubernetes.io/managed-by": FIELD_MANAGER,
            LABEL_JOB: self.name,
            LABEL_UID: self.uid,
        }

    def object_names(self) -> ObjectNames:
        """Return the names of what is made for the job beside its pods."""
        name = object_name(self.name, self.uid)
        return ObjectNames(shared=name, secret=name)

    def old_object_names(self) -> ObjectNames:
        """Return the names that the operator of the version before gave."""
        return ObjectNames(shared=self.name, secret=f"{self.name}-secret")

    def pod_name(self, index: int) -> str:
        """Return the name of the pod with an index."""
        return f"{self.name}-{index}"

    def option(self, *path: str, default: Any = None) -> Any:
        """Return a field of the specification by its path, or the default."""
        value: Any = self.spec
        for key in path:
            if not isinstance(value, Mapping) or value.get(key) is None:
                return default
            value = value[key]
        return value

    def locations(
        self, pods: Iterable[ObservedPod], nodes: Mapping[str, ObservedNode] | None
    ) -> dict[str, Location]:
        """Return where the nodes of pods are, by the labels that scheduling names."""
        near = self.option("scheduling", "replicaTopologyKey")
        apart = self.option("scheduling", "spreadTopologyKey")
        if nodes is None or not (near or apart):
            return {}
        locations = {}
        for name in sorted({p.node for p in pods} & nodes.keys()):
            labels = nodes[name].labels
            location = Location(near=labels.get(near, ""), apart=labels.get(apart, ""))
            if location != Location():
                locations[name] = location
        return locations

    def repair_policy(
        self,
        *,
        force_delete_s: float,
        image_pull_s: float,
        stranded_s: float,
        ignore_cordon: bool,
    ) -> RepairPolicy:
        """Return what a repair of this job may do."""
        assert self.job is not None
        window = self.job.spec.recovery.window
        most = window.max_repairs
        return RepairPolicy(
            max_repairs=max(10, 2 * self.job.num_pods) if most == "Auto" else most,
            window_s=float(window.seconds),
            force_delete_s=force_delete_s,
            stuck_image_s=image_pull_s,
            stranded_s=stranded_s,
            ignore_cordon=ignore_cordon,
        )


def view_job(body: Mapping[str, Any]) -> JobView:
    """Return the view of a TrainingJob object."""
    metadata = body["metadata"]
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": metadata["name"], "namespace": metadata.get("namespace")},
        "spec": _plain(body.get("spec") or {}),
    }
    job, invalid, template_problem = None, "", ""
    status = body.get("status") or {}
    try:
        job = parse_training_job(manifest)
        # What runs is not stopped by an operator that has become stricter.
        if not status.get("startTime"):
            template_problem = _problem_of_template(job)
            if not (status.get("quorum") or (status.get("pods") or {}).get("made")):
                job.check_beginning()
    except InvalidSpecError as error:
        job, invalid = None, str(error)
    if template_problem and not status.get("quorum"):
        job, invalid = None, template_problem
    deleted = metadata.get("deletionTimestamp")
    return JobView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=JobUid(metadata["uid"]),
        generation=int(metadata.get("generation", 0)),
        manifest=manifest,
        status=_plain(body.get("status") or {}),
        finalizers=tuple(metadata.get("finalizers") or ()),
        deleted_at_s=parse_time(deleted) if deleted else None,
        job=job,
        invalid=invalid,
        template_problem=template_problem,
    )


def _problem_of_template(job: TrainingJob) -> str:
    try:
        check_template(job.spec)
    except InvalidSpecError as error:
        return str(error)
    return ""


def parse_time(text: str | None) -> float:
    """Return the wall clock of a Kubernetes time; 0 of none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def show_time(at_s: float) -> str:
    """Return a wall clock as Kubernetes writes it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(value: Any) -> Any:
    """Return a deep copy in plain dicts and lists."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
