"""The pool of local mode: as many pods as the job needs, by the operator's decision.

It looks at its pods and asks the api which are needed, as the operator does in a cluster. What
follows is core's to decide (:func:`mainstay_core.pool.repair.plan_repair`): which pods are lost and
told of, which are made, which are told to end. Here it is only done. Losses are told first, by what
the api was last heard to want: an api that is away hides none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence, Set

from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_cli.base.logs import last_line
from mainstay_cli.local.pods import Kubelet, Pod
from mainstay_cli.local.processes import ChildProcesses
from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import Loss, LossCause, PodDemand, demand_of
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import ObservedPod
from mainstay_core.pool.repair import Repair, RepairPolicy, plan_repair
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.facts import Fact

logger = logging.getLogger(__name__)

QUICK_END_S = 5.0
"""A pod that ends sooner than this hardly did any work."""
MAX_QUICK_ENDS = 5
"""So many in a row mean that pods cannot live here; the run ends with the reason."""
LOOK_S = 0.5
"""How often the pool looks at its pods and asks the api, when nothing happens."""
QUIET_LOOKS = 20
"""After so many looks in a row that found nothing new it looks half as often: to answer takes the
api processor time that is the job's on this machine. A pod that ends is seen at once."""


class LookPace:
    """Chooses how long to wait between two looks at the pods: longer where nothing happens.

    Args:
        look_s: seconds to wait while something does.
    """

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._num_quiet = 0
        """Looks in a row that found nothing new."""

    def stir(self) -> None:
        """Something has happened."""
        self._num_quiet = 0

    def next_wait_s(self) -> float:
        """Return the seconds to the next look, after one."""
        self._num_quiet += 1
        return self._look_s * (2 if self._num_quiet > QUIET_LOOKS else 1)


class LocalPool:
    """Keeps as many pods alive as the api says, until told to stop.

    Args:
        kubelet: makes the pods and sees them end.
        children: owns the processes.
        client: the api that says what is needed and learns what happened.
        job: uid of the job.
        handover_s: how long a pod that is told to end may take to hand its work over.
        max_repairs: losses in the run that are made good; after that places stay empty.
        look_s: seconds between two looks when nothing happens.
    """

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        children: ChildProcesses,
        client: ApiClient,
        job: str,
        handover_s: float,
        max_repairs: int,
        look_s: float = LOOK_S,
    ) -> None:
        self._kubelet = kubelet
        self._children = children
        self._client = client
        self._job = job
        self._handover_s = handover_s
        self._policy = RepairPolicy(max_repairs=max_repairs, window_s=math.inf)
        self._pace = LookPace(look_s)
        self._pods: dict[PodUid, Pod] = {}
        self._memory = PoolMemory()
        self._demand: PodDemand | None = None
        """What the api said last."""
        self._num_made = 0
        self._num_quick_ends = 0
        self._num_not_made = 0
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Keep as many pods as the job needs until cancelled or told to stop.

        Raises:
            CliError: pods end as soon as they are made.
        """
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                self._changed.clear()
                known = self._demand
                await self._look(group)
                if self._demand != known:
                    self._pace.stir()
                # Not wait_for, which loses a cancellation that comes together with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pace.next_wait_s()):
                        await self._changed.wait()
                        self._pace.stir()

    def stop(self) -> None:
        """Make no more pods: whatever ends from now on was meant to."""
        self._stopping.set()
        self._changed.set()

    async def wait_ended(self) -> None:
        """Wait until all processes of all pods have ended by themselves."""
        halves = [h for p in self._pods.values() for h in (p.supervisor, p.launcher) if h]
        await asyncio.gather(*(asyncio.shield(half.ended) for half in halves))

    async def _look(self, group: asyncio.TaskGroup) -> None:
        """See how the pods are, ask what is needed, and do what follows."""
        pods = [pod.observe() for pod in self._pods.values()]
        await self._report_losses(pods)
        try:
            demand = demand_of(await self._client.fetch_pods(self._job))
        except ApiError as error:
            logger.debug("how many pods are needed is not known: %s", error)
            return
        self._demand, self._memory = demand, self._memory.after_hearing(demand)
        if demand.over or self._stopping.is_set():
            return  # what ends now has done its work
        repair = plan_repair(
            memory=self._memory,
            pods=pods,
            nodes=None,
            demand=demand,
            # A name is never used again: the numbers say which pod came after which.
            taken=range(self._num_made + 1),
            policy=self._policy,
            now_s=time.time(),
        )
        logger.debug("%s", repair.reason)
        self._account(repair.losses)
        if not await self._tell(repair.tell):
            return  # all of it follows again from what is seen then
        if repair.losses:
            self._children.reap_orphans()
        self._end_pods(repair, ended={p.uid for p in pods if p.ended})
        made = await self._make_pods(repair, group)
        self._memory = self._memory.after_look([*pods, *made], None, repair.losses, told=True)

    async def _report_losses(self, pods: Sequence[ObservedPod]) -> None:
        """Tell at once which pods have failed or were ended.

        What has left by itself waits for what the api says next: the job may be over.
        """
        demand = self._demand
        if demand is None or demand.over or self._stopping.is_set():
            return
        found = self._memory.find_untold(pods, None, demand, time.time())
        losses = [loss for loss in found if loss.cause is not LossCause.LEFT]
        self._account(losses)
        await self._tell([loss.fact() for loss in losses if loss.uid in demand.living])

    # --- what a repair says ----------------------------------------------------------------------

    def _account(self, losses: Iterable[Loss]) -> None:
        """Count lost pods and say that they are gone, once, however often that is seen.

        Raises:
            CliError: too many pods in a row have ended as soon as they started.
        """
        self._memory, new = self._memory.account(losses)
        for loss in new:
            pod = self._pods.get(loss.uid)
            if pod is None or pod.end is None:
                continue
            if loss.leaving or loss.cause in (LossCause.LEFT, LossCause.ENDED):
                logger.info("pod %s has left: %s", loss.name, loss.evidence)
                continue
            self._count_end(pod, killed=pod.end.killed, lifetime_s=pod.end.lifetime_s)
            logger.warning("pod %s is gone: %s", loss.name, loss.evidence)

    async def _tell(self, facts: Sequence[Fact]) -> bool:
        """Tell the api; return whether it has heard or has no use for it."""
        if not facts:
            return True
        try:
            await self._client.post_facts(self._job, facts)
        except ApiError as error:
            # A job that is unknown was lost with the store: its supervisors recover it.
            heard = error.is_answer and error.failure is not Failure.UNKNOWN
            logger.debug("the api has %s: %s", "no use for facts" if heard else "not heard", error)
            return heard
        return True

    def _end_pods(self, repair: Repair, ended: Set[PodUid]) -> None:
        """Tell living pods to end; forget those that were seen to have ended."""
        for end in repair.end:
            if end.uid in ended:
                self._pods.pop(end.uid).kill()
            else:
                self._pods[end.uid].tell_to_end(end.why, self._handover_s)

    async def _make_pods(self, repair: Repair, group: asyncio.TaskGroup) -> list[ObservedPod]:
        if repair.counts.not_made > self._num_not_made:
            logger.warning("no more pods are made: the budget of repairs is used up")
        self._num_not_made = repair.counts.not_made
        made: list[ObservedPod] = []
        for index in repair.make:
            if self._stopping.is_set():
                break
            pod = await self._kubelet.make(index)
            self._num_made = max(self._num_made, index)
            self._pods[pod.uid] = pod
            made.append(pod.observe())
            group.create_task(self._run_pod(pod))
        return made

    # --- pods ------------------------------------------------------------------------------------

    async def _run_pod(self, pod: Pod) -> None:
        await self._kubelet.run(pod, self._may_relaunch)
        self._changed.set()

    def _may_relaunch(self, pod: Pod, killed: bool) -> bool:
        """Return whether a launcher that has ended is started again.

        That counts against the budget of repairs, too.

        Raises:
            CliError: too many pods in a row have ended as soon as they started.
        """
        leaves = pod.told_for or (self._demand is not None and pod.uid in self._demand.leaving)
        num_counted = len(self._memory.counted)
        if self._stopping.is_set() or leaves or num_counted >= self._policy.max_repairs:
            return False
        self._memory = self._memory.count(time.time())
        self._count_end(pod, killed=killed, lifetime_s=pod.lifetime_s())
        return True

    def _count_end(self, pod: Pod, *, killed: bool, lifetime_s: float) -> None:
        quick = not killed and lifetime_s < QUICK_END_S
        self._num_quick_ends = self._num_quick_ends + 1 if quick else 0
        if self._num_quick_ends >= MAX_QUICK_ENDS:
            log = pod.directory / "supervisor.log"
            raise CliError(
                f"pods end as soon as they start; the last one said: {last_line(log)} (see {log})",
                ExitCode.FAILED,
            )
