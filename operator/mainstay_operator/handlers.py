"""Handlers that kopf calls. They pass on what the watches show and decide nothing.

Pods and nodes are indexed and their events wake the job that they concern; no
handler of kopf's writes anything, so it leaves no annotation and no finalizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import kopf

from mainstay_core.job.spec import GROUP, LABEL_UID, PLURAL, VERSION
from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_operator.actuator import Actuator
from mainstay_operator.api_client import ApiClient
from mainstay_operator.elector import Elector, await_turn, is_done_before, run_as_leader
from mainstay_operator.jobs import Jobs
from mainstay_operator.kube import KubeClient
from mainstay_operator.metrics import Metrics
from mainstay_operator.namespaces import await_answer, await_open
from mainstay_operator.node_cache import NodeCache
from mainstay_operator.observed import job_of, observe_node, observe_pod
from mainstay_operator.records import Records
from mainstay_operator.relist import Relist
from mainstay_operator.resources import view_job
from mainstay_operator.serving import serving
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

KOPF_FINALIZER = f"{GROUP}/kopf"
SERVER_TIMEOUT_S = 240
CLIENT_TIMEOUT_S = 270


class NoDiffs(kopf.DiffBaseStorage):
    """Stores nothing from which kopf could derive what changed in an object.

    No handler asks for that. kopf would copy every object that a watch shows: a fifth of the
    operator's work when a thousand pods start.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing of an object."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return that nothing was known before."""
        return None

    def store(self, **_: Any) -> None:
        """Write nothing."""


def _instance() -> str:
    """Return the name of this process's pod, or of its machine."""
    return os.environ.get("HOSTNAME") or socket.gethostname()


class Operator:
    """The handlers of one operator, in a registry of their own.

    Args:
        settings: of the operator.
        metrics: of the operator.
        elector: says whether this process may act; None: it always may.
    """

    def __init__(self, settings: Settings, metrics: Metrics, elector: Elector | None) -> None:
        self._settings = settings
        self.metrics = metrics
        self._elector = elector
        self._stack = contextlib.AsyncExitStack()
        self._jobs: Jobs | None = None
        self._kube: KubeClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pods: Mapping[str, Iterable[ObservedPod]] = {}
        self._nodes = NodeCache()

    @property
    def jobs(self) -> Jobs:
        """All jobs; there is one from the start on."""
        assert self._jobs is not None
        return self._jobs

    def _forbid(self) -> str:
        """Return why nothing may be changed now, in the cluster or at the api; '' if it may.

        A process that stood still for long may lead no more before it finds out.
        """
        return self._elector.forbid() if self._elector is not None else ""

    def register(self) -> kopf.OperatorRegistry:
        """Return a registry with all handlers."""
        registry = kopf.OperatorRegistry()
        jobs = (GROUP, VERSION, PLURAL)
        kopf.on.login(registry=registry)(kopf.login_with_kubeconfig)
        kopf.on.login(registry=registry)(kopf.login_with_service_account)
        kopf.on.startup(registry=registry)(self.start)
        kopf.on.cleanup(registry=registry)(self.stop)
        kopf.on.event(*jobs, registry=registry, id="job")(self.on_job)
        of_jobs = {LABEL_UID: kopf.PRESENT}
        kopf.index("pods", labels=of_jobs, registry=registry, id="pods_by_job")(self.index_pod)
        kopf.on.event("pods", labels=of_jobs, registry=registry, id="pod")(self.on_pod)
        if self._settings.watch_nodes:
            # An index, though nobody reads it: what is indexed is listed before anything is done.
            kopf.index("nodes", registry=registry, id="nodes_by_name")(self.index_node)
            kopf.on.event("nodes", registry=registry, id="node")(self.on_node)
        return registry

    async def start(self, settings: kopf.OperatorSettings, **kwargs: Any) -> None:
        """Open the lines to the cluster and the api."""
        own, metrics = self._settings, self.metrics
        configure(settings, watch_idle_s=own.watch_idle_s)
        # Namespaced rights let nobody watch namespaces and CRDs: kopf would try for half a minute.
        settings.scanning.disabled = bool(own.namespace_list)
        self._pods = kwargs["pods_by_job"]
        self._kube = await self._stack.enter_async_context(self.new_client())
        line = ApiClient(own.api_url, own.read_token, metrics, self._forbid)
        api = await self._stack.enter_async_context(line)
        records = Records(api)
        self._jobs = Jobs(
            indexed=lambda uid: tuple(self._pods.get(uid, ())),
            nodes=lambda: self._nodes.show() if own.watch_nodes else None,
            actuator=Actuator(self._kube, own, _instance(), metrics),
            api=api,
            records=records,
            settings=own,
            metrics=self.metrics,
        )
        resync = Relist(
            kube=self._kube,
            jobs=self._jobs,
            records=records,
            nodes=self._nodes if own.watch_nodes else None,
            metrics=self.metrics,
            settings=own,
        )
        self._tasks = [asyncio.create_task(resync.run()), asyncio.create_task(records.run())]

    async def stop(self, **_: Any) -> None:
        """Close the lines."""
        for task in self._tasks:
            task.cancel()
        if self._jobs is not None:
            await self._jobs.close()
        await self._stack.aclose()

    def new_client(self) -> KubeClient:
        """Return a client of the Kubernetes API, not open yet."""
        own = self._settings
        return KubeClient(
            qps=own.qps,
            burst=own.burst,
            timeout_s=own.kube_timeout_s,
            metrics=self.metrics,
            forbid=self._forbid,
        )

    def check(self) -> tuple[str, dict[str, Any]]:
        """Return why the operator is not alive ('' if it is), and the numbers that show it."""
        own, jobs = self._settings, self._jobs
        problem = self.metrics.liveness.find_problem(
            jobs.running_passes() if jobs is not None else (),
            max_idle_s=own.max_idle_s,
            qps=own.qps,
            now_s=time.monotonic(),
        )
        return problem, {
            "leads": not self._forbid(),
            "resync_age_s": round(self.metrics.resync_age_s(), 3),
            "slowest_look_s": round(jobs.slowest_s(), 3) if jobs is not None else 0.0,
            "jobs": jobs.num_jobs if jobs is not None else 0,
            "requests": dict(sorted(self._kube.requests.items())) if self._kube else {},
        }

    async def on_job(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        """A job is there, has changed, or is no more."""
        self.metrics.note_watched(PLURAL, event["type"])
        if event["type"] == "DELETED":
            self.jobs.drop_job(body["metadata"]["uid"])
        else:
            self.jobs.note_job(view_job(body))

    async def on_pod(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        """A pod of a job has changed, or is no more."""
        self.metrics.note_watched("pods", event["type"])
        job = job_of(body)
        if job is not None:
            self.jobs.note_pod(job, observe_pod(body), deleted=event["type"] == "DELETED")

    async def on_node(self, event: kopf.RawEvent, body: kopf.Body, **_: Any) -> None:
        """A node has changed, or is no more. Most changes are its heartbeats: no news."""
        self.metrics.note_watched("nodes", event["type"])
        node = observe_node(body)
        if event["type"] == "DELETED":
            node = ObservedNode(name=node.name, gone=True)
        self.jobs.note_node(changed=self._nodes.note_node(node))

    def index_pod(self, body: kopf.Body, **_: Any) -> dict[str, ObservedPod]:
        """Pods by the uid of their job."""
        job = job_of(body)
        return {job: observe_pod(body)} if job is not None else {}

    def index_node(self, body: kopf.Body, **_: Any) -> dict[str, ObservedNode]:
        """Nodes by name; what is seen of them is kept, as deleted ones count as well."""
        self._nodes.note_first(observe_node(body))
        return {}


def configure(settings: kopf.OperatorSettings, *, watch_idle_s: float) -> None:
    """Have kopf write nothing, notice a silent watch, and see only pods of jobs."""
    # Never used, as no handler needs one; a finalizer of kopf's that none needs it takes away.
    settings.persistence.finalizer = KOPF_FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = NoDiffs()
    settings.posting.enabled = False
    settings.watching.inactivity_timeout = watch_idle_s
    settings.watching.server_timeout = SERVER_TIMEOUT_S
    settings.watching.client_timeout = CLIENT_TIMEOUT_S
    settings.watching.label_selectors["pods"] = LABEL_UID


async def serve(settings: Settings, ready: Callable[[], None] | None = None) -> None:
    """Run the operator until it is told to end, or the namespaces that it can serve are others.

    With a Lease, only the operator that has it does anything; the others answer their probes.

    Raises:
        InvalidSpecError: a setting cannot be used; it is named.
        LeadershipLostError: another operator may lead by now.
    """
    metrics, ended = Metrics(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Until kopf has handlers of its own.
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        elector = None
        if settings.lease:
            line = KubeClient(
                qps=settings.qps,
                burst=settings.burst,
                timeout_s=settings.lease_renew_s / 2,
                metrics=metrics,
            )
            elector = _elector(await stack.enter_async_context(line), settings, metrics)
        operator = Operator(settings, metrics, elector)
        await stack.enter_async_context(serving(settings.liveness_url, operator.check, metrics))
        kube = await stack.enter_async_context(operator.new_client())
        if elector is None:
            metrics.leader.set(1)
            await _run(operator, kube, settings, ended, ready)
        elif await await_turn(elector, ended):
            await run_as_leader(elector, _run(operator, kube, settings, ended, ready))


def _elector(kube: KubeClient, settings: Settings, metrics: Metrics) -> Elector:
    """Return this process's elector. Its identity is no earlier process's, of this pod neither."""
    namespace, _, name = settings.lease.partition("/")
    identity = f"{_instance()}_{uuid.uuid4()}"
    return Elector(kube, (namespace, name), identity, settings.lease_timing, metrics)


async def _run(
    operator: Operator,
    kube: KubeClient,
    settings: Settings,
    ended: asyncio.Event,
    ready: Callable[[], None] | None,
) -> None:
    """Run an operator that may act, until ``ended`` is set or it cannot go on as it began."""
    wanted, metrics = settings.namespace_list, operator.metrics
    served: tuple[str, ...] = ()

    async def find_served() -> None:
        nonlocal served
        served = await await_open(kube, settings, metrics)

    if wanted and not await is_done_before(find_served(), ended):
        return
    if served != wanted:
        closed = ", ".join(n for n in wanted if n not in served)
        logger.warning("these namespaces cannot be served now: %s", closed)
    flag = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=operator.register(),
            standalone=True,
            clusterwide=not wanted,
            namespaces=served,
            ready_flag=flag,
            stop_flag=ended,
        )
    )
    waiting = asyncio.create_task(flag.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if ready is not None and not running.done():
        ready()
    changing = asyncio.create_task(_await_change(kube, settings, served, metrics))
    await asyncio.wait([running, changing], return_when=asyncio.FIRST_COMPLETED)
    changing.cancel()
    ended.set()
    await running


async def _await_change(
    kube: KubeClient, settings: Settings, served: tuple[str, ...], metrics: Metrics
) -> None:
    """Wait until other namespaces can be served than ``served``.

    kopf would end with an error some time after it must not watch one any more.
    """
    found = served
    while found == served:
        await asyncio.sleep(settings.resync_s)
        if settings.namespace_list:
            found = await await_answer(kube, settings, metrics)
    logger.warning("what can be served is now %s: begin anew", ", ".join(found) or "no namespace")
