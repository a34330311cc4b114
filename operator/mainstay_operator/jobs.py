"""Routes what the watches tell to the job that it concerns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from mainstay_core.base.logs import about
from mainstay_core.pool.observed import ObservedNode, ObservedPod
from mainstay_operator.actuator import Actuator
from mainstay_operator.api_client import ApiClient
from mainstay_operator.decisions import about_job, log_decision
from mainstay_operator.liveness import RunningPass
from mainstay_operator.metrics import Metrics
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.reconciler import Reconciler
from mainstay_operator.records import Records
from mainstay_operator.resources import FINALIZER, JobView
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

RESTART_S = 5.0
"""A reconciler that fails for a reason that nobody thought of starts anew so much later."""


class Jobs:
    """Runs a reconciler for every job that the operator serves.

    Args:
        indexed: returns a job's pods as the watch has shown them.
        nodes: returns the nodes by name, None if they are not watched.
        actuator: acts in the cluster.
        api: client of the api.
        records: has the api forget jobs that are no more.
        settings: of the operator.
        metrics: counts what is heard and done.
    """

    def __init__(
        self,
        *,
        indexed: Callable[[str], Iterable[ObservedPod]],
        nodes: Callable[[], Mapping[str, ObservedNode] | None],
        actuator: Actuator,
        api: ApiClient,
        records: Records,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._indexed = indexed
        self._nodes = nodes
        self._actuator = actuator
        self._api = api
        self._records = records
        self._settings = settings
        self._metrics = metrics
        self._reconcilers: dict[str, Reconciler] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked_for: frozenset[str] = frozenset()
        self._shown_since: set[str] = set()

    def note_job(self, view: JobView) -> None:
        """Learn that a job is there, or has changed."""
        uid = view.uid
        self._shown_since.add(uid)
        if view.deleted_at_s is not None:
            self._records.forget(uid)
        reconciler = self._reconcilers.get(uid)
        if reconciler is not None:
            reconciler.update(view)
            return
        reconciler = Reconciler(
            view,
            pods=PodCache(lambda: self._indexed(uid)),
            nodes=self._nodes,
            actuator=self._actuator,
            api=self._api,
            settings=self._settings,
            metrics=self._metrics,
        )
        self._reconcilers[uid] = reconciler
        log_decision(view, "Keep", f"the job is kept from now on, at generation {view.generation}")
        self._tasks[uid] = asyncio.create_task(self._keep(uid, reconciler))
        self._metrics.jobs.set(len(self._reconcilers))

    def drop_job(self, uid: str) -> None:
        """Learn that a job is no more."""
        self._shown_since.add(uid)
        self._records.forget(uid)
        self._actuator.drop_job(uid)
        reconciler = self._reconcilers.pop(uid, None)
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()
        if reconciler is not None:
            log_decision(reconciler.view, "Drop", "the job is no more, and is not kept any more")
            self._metrics.drop_job(uid, reconciler.view.namespace, reconciler.view.name)
        self._metrics.jobs.set(len(self._reconcilers))

    def begin_list(self) -> None:
        """Remember that jobs are listed now: what the watch tells from now on is newer."""
        self._asked_for = frozenset(self._reconcilers)
        self._shown_since.clear()

    def apply_list(self, listed: Iterable[JobView], unlisted: Collection[str] = ()) -> bool:
        """Learn from the list which jobs there are; return whether the watch has missed something.

        A job that needs nothing any more is kept by nobody, so it is no news.

        Args:
            listed: all jobs that there are.
            unlisted: namespaces whose jobs could not be listed.
        """
        there = {view.uid: view for view in listed}
        gone = [
            uid
            for uid in self._asked_for - there.keys()
            if uid not in self._shown_since and self._namespace_of(uid) not in unlisted
        ]
        news = [
            view
            for uid, view in there.items()
            if uid not in self._shown_since and self._is_news(view)
        ]
        for uid in gone:
            self.drop_job(uid)
        for view in news:
            logger.warning("the watch has not shown it so", extra=about(**about_job(view)))
            self.note_job(view)
        return bool(gone or news)

    def _namespace_of(self, uid: str) -> str:
        reconciler = self._reconcilers.get(uid)
        return reconciler.view.namespace if reconciler is not None else ""

    def _is_news(self, view: JobView) -> bool:
        reconciler = self._reconcilers.get(view.uid)
        if reconciler is None:
            return view.deleted_at_s is None or FINALIZER in view.finalizers
        known = reconciler.view
        return (view.generation, view.deleted_at_s) != (known.generation, known.deleted_at_s)

    def note_pod(self, job: str, pod: ObservedPod, *, deleted: bool) -> None:
        """Learn that a pod of a job has changed, or is no more."""
        reconciler = self._reconcilers.get(job)
        if reconciler is not None:
            if deleted:
                reconciler.pods.note_deleted(pod)
            reconciler.wake()

    def note_node(self, *, changed: bool) -> None:
        """Learn of a node; wake the jobs if it is not what it was."""
        if not changed:
            return
        for reconciler in self._reconcilers.values():
            reconciler.wake()

    async def close(self) -> None:
        """Keep no job any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def running_passes(self) -> list[RunningPass]:
        """Return the passes that are under way."""
        passes = (reconciler.running_pass() for reconciler in self._reconcilers.values())
        return [p for p in passes if p is not None]

    def slowest_s(self) -> float:
        """Return the age of the oldest last pass, in seconds."""
        now_s = time.monotonic()
        return max((now_s - r.passed_at_s for r in self._reconcilers.values()), default=0.0)

    @property
    def num_jobs(self) -> int:
        """Jobs that are kept."""
        return len(self._reconcilers)

    async def _keep(self, uid: str, reconciler: Reconciler) -> None:
        while True:
            try:
                await reconciler.run()
            except asyncio.CancelledError:
                raise
            except Exception:
                # One job's trouble is no other's: it is logged with its trace, and tried again.
                fields = about_job(reconciler.view)
                logger.exception("a pass has crashed", extra=about(**fields))
                await asyncio.sleep(RESTART_S)
            else:
                break
        if self._reconcilers.get(uid) is reconciler:
            del self._tasks[uid]
            self.drop_job(uid)
