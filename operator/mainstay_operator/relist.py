"""Lists jobs and nodes now and then: what a watch has not shown is found all the same.

Pods are listed by their jobs' keepers. A list that shows more than the watch
did is put right, counted and noted: a watch that shows nothing
for long though there was something to show is a reason to start anew.
"""

from __future__ import annotations

import asyncio
import logging

from mainstay_operator.jobs import Fleet
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.metrics import Journal
from mainstay_operator.node_cache import NodeCache
from mainstay_operator.observed import see_node
from mainstay_operator.resources import PLURAL, view_job
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

NODES_EVERY = 5
"""Resyncs between two lists of nodes: there are many, and each is large."""
ANSWERED = (403, 404)
"""Refusals that starting anew would not mend: missing rights, no such resource."""


class Resync:
    """The operator's own look at everything.

    Args:
        kube: client of the Kubernetes API.
        fleet: all jobs.
        nodes: what is known of nodes; None if they are not watched.
        journal: learns what was answered, and missed.
        settings: of the operator.
    """

    def __init__(
        self,
        *,
        kube: KubeClient,
        fleet: Fleet,
        nodes: NodeCache | None,
        journal: Journal,
        settings: Settings,
    ) -> None:
        self._kube = kube
        self._fleet = fleet
        self._nodes = nodes
        self._journal = journal
        self._settings = settings
        self._rounds = 0

    async def run(self) -> None:
        """List everything every so often, for ever; what goes wrong is logged and tried again."""
        while True:
            await asyncio.sleep(self._settings.resync_s)
            try:
                await self.look()
            except KubeError as error:
                logger.warning("resync: %s", error)
                if error.status in ANSWERED:
                    self._journal.note_answer(complete=False)
            except Exception:
                logger.exception("resync")

    async def look(self) -> None:
        """List once, and put right what is known.

        Raises:
            KubeError: the API server refused, or did not answer.
        """
        self._fleet.begin_list()
        views = []
        for namespace in self._settings.namespace_list or ("",):
            bodies = await self._kube.list(PLURAL, namespace)
            views += [view_job(body) for body in bodies]
        if self._fleet.put_right(views):
            self._journal.note_missed(PLURAL)
        if self._nodes is not None and self._rounds % NODES_EVERY == 0:
            self._nodes.begin_list()
            listed = await self._kube.list("nodes", "")
            if self._nodes.put_right([see_node(body) for body in listed]):
                self._journal.note_missed("nodes")
                self._fleet.learn_node(changed=True)
        self._rounds += 1
        self._journal.note_answer(complete=True)
