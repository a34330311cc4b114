"""Lists jobs and nodes now and then: what a watch has not shown is found all the same.

Pods are listed by their jobs' reconcilers. A list that shows more than the watch
did is put right, counted and noted: a watch that shows nothing
for long though there was something to show is a reason to start anew.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mainstay_core.base.logs import about
from mainstay_core.job.spec import PLURAL
from mainstay_operator.jobs import Jobs
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.metrics import Metrics
from mainstay_operator.namespaces import ANSWERED, is_gone
from mainstay_operator.node_cache import NodeCache
from mainstay_operator.observed import observe_node
from mainstay_operator.records import Records, find_orphans
from mainstay_operator.resources import JobView, view_job
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

RECORDS_EVERY = 10
"""Resyncs between two comparisons of what the api knows with what there is: it reads every job."""
NODES_EVERY = 5
"""Resyncs between two lists of nodes: there are many, and each is large."""


class Relist:
    """Lists every job and node now and then, and corrects what the watches have missed.

    Args:
        kube: client of the Kubernetes API.
        jobs: all jobs.
        records: has the api forget jobs that are no more.
        nodes: what is known of nodes; None if they are not watched.
        metrics: counts what was answered, and what the watches missed.
        settings: of the operator.
    """

    def __init__(
        self,
        *,
        kube: KubeClient,
        jobs: Jobs,
        records: Records,
        nodes: NodeCache | None,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._kube = kube
        self._jobs = jobs
        self._records = records
        self._nodes = nodes
        self._metrics = metrics
        self._settings = settings
        self._rounds = 0
        self._records_at = 0

    async def run(self) -> None:
        """List everything every so often, for ever; what goes wrong is logged and tried again."""
        while True:
            await asyncio.sleep(self._settings.resync_s)
            try:
                await self.list_all()
            except KubeError as error:
                logger.warning("resync: %s", error)
                if error.status in ANSWERED:
                    self._metrics.note_answer(complete=False)
            except Exception:
                logger.exception("resync")

    async def list_all(self) -> None:
        """List once, and put right what is known.

        Raises:
            KubeError: the API server refused, or did not answer.
        """
        self._jobs.begin_list()
        is_due = self._rounds >= self._records_at
        known = await self._records.fetch_known() if is_due else None
        namespaces = self._settings.namespace_list
        views: list[JobView] = []
        unlisted: set[str] = set()
        for namespace in namespaces or ("",):
            bodies = await self._list_jobs(namespace)
            if bodies is None:
                unlisted.add(namespace)
            else:
                views += [view_job(body) for body in bodies]
        if self._jobs.apply_list(views, unlisted):
            self._metrics.note_missed(PLURAL)
        there = {view.uid for view in views}
        if known is not None:
            heard = [job for job in known if job.namespace not in unlisted]
            for uid in find_orphans(heard, there, namespaces):
                logger.info("the job was deleted while nobody looked", extra=about(uid=uid))
                self._records.forget(uid)
            self._records_at = self._rounds + RECORDS_EVERY
        if self._nodes is not None and self._rounds % NODES_EVERY == 0:
            self._nodes.begin_list()
            listed = await self._kube.list("nodes", "")
            if self._nodes.apply_list([observe_node(body) for body in listed]):
                self._metrics.note_missed("nodes")
                self._jobs.note_node(changed=True)
        self._rounds += 1
        self._metrics.note_answer(complete=not unlisted)

    async def _list_jobs(self, namespace: str) -> list[dict[str, Any]] | None:
        """Return the jobs of a namespace, of all if it is ''; None if they must not be listed.

        A namespace that is deleted takes the operator's rights in it along. Whether there is such
        a namespace, the operator may ask all the same.
        """
        try:
            return await self._kube.list(PLURAL, namespace)
        except KubeError as error:
            if not namespace or error.status not in ANSWERED:
                raise
            if await is_gone(self._kube, namespace):
                return []
            logger.warning("resync: %s", error)
            return None
