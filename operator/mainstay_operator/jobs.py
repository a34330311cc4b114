"""All jobs: what the watches tell goes to the job that it concerns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from mainstay_core.pool.observed import SeenNode, SeenPod
from mainstay_operator.actuator import Hands
from mainstay_operator.api_client import ApiLine
from mainstay_operator.liveness import RunningLook
from mainstay_operator.metrics import Journal
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.reconciler import Keeper
from mainstay_operator.resources import FINALIZER, JobView
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
        journal: notes what is heard and done.
    """

    def __init__(
        self,
        *,
        indexed: Callable[[str], Iterable[SeenPod]],
        nodes: Callable[[], Mapping[str, SeenNode] | None],
        hands: Hands,
        api: ApiLine,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self._indexed = indexed
        self._nodes = nodes
        self._hands = hands
        self._api = api
        self._settings = settings
        self._journal = journal
        self._keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked_for: frozenset[str] = frozenset()
        self._told_since: set[str] = set()

    def learn_job(self, view: JobView) -> None:
        """Learn that a job is there, or has changed."""
        uid = view.uid
        self._told_since.add(uid)
        keeper = self._keepers.get(uid)
        if keeper is not None:
            keeper.update(view)
            return
        keeper = Keeper(
            view,
            pods=PodCache(lambda: self._indexed(uid)),
            nodes=self._nodes,
            hands=self._hands,
            api=self._api,
            settings=self._settings,
            journal=self._journal,
        )
        self._keepers[uid] = keeper
        self._tasks[uid] = asyncio.create_task(self._keep(uid, keeper))
        self._journal.metrics.jobs.set(len(self._keepers))

    def forget_job(self, uid: str) -> None:
        """Learn that a job is no more."""
        self._told_since.add(uid)
        keeper = self._keepers.pop(uid, None)
        task = self._tasks.pop(uid, None)
        if task is not None:
            task.cancel()
        if keeper is not None:
            self._journal.forget_job(uid, keeper.view.namespace, keeper.view.name)
        self._journal.metrics.jobs.set(len(self._keepers))

    def begin_list(self) -> None:
        """Remember that jobs are listed now: what the watch tells from now on is newer."""
        self._asked_for = frozenset(self._keepers)
        self._told_since.clear()

    def put_right(self, listed: Iterable[JobView]) -> bool:
        """Learn from the list which jobs there are; return whether the watch has missed something.

        A job that needs nothing any more is kept by nobody, so it is no news.
        """
        there = {view.uid: view for view in listed}
        gone = [u for u in self._asked_for - there.keys() if u not in self._told_since]
        news = [
            view
            for uid, view in there.items()
            if uid not in self._told_since and self._is_news(view)
        ]
        for uid in gone:
            self.forget_job(uid)
        for view in news:
            logger.warning("%s/%s: the watch has not shown it so", view.namespace, view.name)
            self.learn_job(view)
        return bool(gone or news)

    def _is_news(self, view: JobView) -> bool:
        keeper = self._keepers.get(view.uid)
        if keeper is None:
            return view.deleted_at_s is None or FINALIZER in view.finalizers
        known = keeper.view
        return (view.generation, view.deleted_at_s) != (known.generation, known.deleted_at_s)

    def learn_pod(self, job: str, pod: SeenPod, *, deleted: bool) -> None:
        """Learn that a pod of a job has changed, or is no more."""
        keeper = self._keepers.get(job)
        if keeper is not None:
            if deleted:
                keeper.pods.note_deleted(pod)
            keeper.wake()

    def learn_node(self, *, changed: bool) -> None:
        """Learn of a node; wake the jobs if it is not what it was."""
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

    def running_looks(self) -> list[RunningLook]:
        """Return the looks at jobs that are under way."""
        looks = (keeper.running_look() for keeper in self._keepers.values())
        return [look for look in looks if look is not None]

    def slowest_s(self) -> float:
        """Return how long ago the job was looked at that waits longest."""
        now_s = time.monotonic()
        return max((now_s - k.looked_at_s for k in self._keepers.values()), default=0.0)

    @property
    def num_jobs(self) -> int:
        """Jobs that are kept."""
        return len(self._keepers)

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
            del self._tasks[uid]
            self.forget_job(uid)
