"""All jobs: what the watches tell goes to the job that it concerns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from mainstay_core.pods_seen import SeenNode, SeenPod
from mainstay_operator.api_line import ApiLine
from mainstay_operator.hands import Hands
from mainstay_operator.keeper import Keeper
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.resources import JobView
from mainstay_operator.settings import Settings

logger = logging.getLogger(__name__)

BURY_S = 5.0
"""A keeper that fails for a reason that nobody thought of starts anew so much later."""


class Fleet:
    """Keeps every job that the operator serves.

    Args:
        indexed: returns a job's pods as the watch has shown them.
        nodes: returns the nodes by name, None if they are not watched.
        hands: acts in the cluster.
        api: line to the api.
        settings: of the operator.
    """

    def __init__(
        self,
        *,
        indexed: Callable[[str], Iterable[SeenPod]],
        nodes: Callable[[], Mapping[str, SeenNode] | None],
        hands: Hands,
        api: ApiLine,
        settings: Settings,
    ) -> None:
        self._indexed = indexed
        self._nodes = nodes
        self._hands = hands
        self._api = api
        self._settings = settings
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._heard_at_s = asyncio.get_running_loop().time()

    def learn_job(self, view: JobView) -> None:
        """Learn that a job is there, or has changed."""
        self._hear()
        keeper = self._keepers.get(view.uid)
        if keeper is not None:
            keeper.update(view)
            return
        uid = view.uid
        keeper = Keeper(
            view,
            pods=PodCache(lambda: self._indexed(uid)),
            nodes=self._nodes,
            hands=self._hands,
            api=self._api,
            settings=self._settings,
        )
        self._keepers[uid] = keeper
        self._tasks[uid] = asyncio.create_task(self._keep(uid, keeper))

    def forget_job(self, uid: str) -> None:
        """Learn that a job is no more."""
        self._hear()
        self._keepers.pop(uid, None)
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()

    def learn_pod(self, job: str, pod: SeenPod, *, deleted: bool) -> None:
        """Learn that a pod of a job has changed, or is no more."""
        self._hear()
        keeper = self._keepers.get(job)
        if keeper is not None:
            if deleted:
                keeper.pods.note_deleted(pod)
            keeper.wake()

    def learn_node(self, *, changed: bool) -> None:
        """Learn of a node; wake the jobs if it is not what it was."""
        self._hear()
        if not changed:
            return
        for keeper in self._keepers.values():
            keeper.wake()

    async def close(self) -> None:
        """Keep no job any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def age_s(self) -> float:
        """Return for how long nothing was heard of the cluster and no look was finished.

        An idle cluster is no silence: jobs are looked at all the time, and without any
        there is nothing to do.
        """
        now_s = asyncio.get_running_loop().time()
        if not self._keepers:
            return 0.0
        return now_s - max(self._heard_at_s, *(k.looked_at_s for k in self._keepers.values()))

    def slowest_s(self) -> float:
        """Return how long ago the job was looked at that waits longest."""
        now_s = asyncio.get_running_loop().time()
        return max((now_s - k.looked_at_s for k in self._keepers.values()), default=0.0)

    @property
    def num_jobs(self) -> int:
        """Jobs that are kept."""
        return len(self._keepers)

    def _hear(self) -> None:
        self._heard_at_s = asyncio.get_running_loop().time()

    async def _keep(self, uid: str, keeper: Keeper) -> None:
        while True:
            try:
                await keeper.run()
            except asyncio.CancelledError:
                raise
            except Exception:
                # One job's trouble is no other's: it is logged with its trace, and tried again.
                logger.exception("%s/%s", keeper.view.namespace, keeper.view.name)
                await asyncio.sleep(BURY_S)
            else:
                break
        if self._keepers.get(uid) is keeper:
            del self._keepers[uid]
            self._tasks.pop(uid, None)
