"""The local process provider: makes pods as processes and sees them end.

It stands in for the operator: it makes no recovery decision. It tells the api
what it knows for certain (a pod is gone), and keeps as many pods as the api says
are wanted: it makes missing ones and ends (SIGTERM) the free ones that the api
names, surplus or drained. A pod is two process groups, its supervisor's and its launcher's with the
trainers. Like a kubelet it starts a launcher again that ends with an error; when the supervisor
ends the whole pod counts as gone and the rest is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from mainstay_cli.base.client import ApiClient
from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_cli.local.forge import Forge
from mainstay_cli.local.processes import Child, ChildProcesses
from mainstay_cli.local.redis_server import last_line
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid
from mainstay_core.job.phase import TERMINAL
from mainstay_core.wire.api import ApiError, Failure
from mainstay_core.wire.facts import PodGone

logger = logging.getLogger(__name__)

QUICK_END_S = 5.0
"""A pod that ends sooner than this hardly did any work."""
MAX_QUICK_ENDS = 5
"""So many in a row mean that pods cannot live here; the run ends with the reason."""
TELL_AGAIN_S = 0.5
RELAUNCH_AFTER_S = 0.2
"""Between two launchers of a pod; if its supervisor ends meanwhile, the pod is over."""
LOOK_S = 0.5
"""How often the api is asked how many pods are wanted."""


@dataclass(slots=True, eq=False)
class Pod:
    """One pod: its identity, its place and its two processes."""

    uid: str
    name: str
    address: str
    directory: Path
    """By a path that is short enough for Unix sockets in it."""
    supervisor: Child
    launcher: Child
    let_go: bool = False
    """It will end, or has: it does not count any more."""
    told_to_end: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal both process groups."""
        self.supervisor.signal_group(number)
        self.launcher.signal_group(number)


StartSupervisor = Callable[[str, str, str], Child]
"""Starts the supervisor of (uid, name, address)."""


class LocalPool:
    """Keeps as many pods alive as the api says until told to stop.

    Args:
        children: owns the processes.
        forge: forks the launchers.
        client: the api that learns what happened.
        job: uid of the job.
        name: of the job; pods are named after it.
        network: first three bytes of the pods' addresses, ``127.x.y``.
        make_pod_dir: makes a pod's directory.
        start_supervisor: starts a supervisor process.
        max_replacements: pods made anew during the run, then the pool shrinks.
    """

    def __init__(
        self,
        *,
        children: ChildProcesses,
        forge: Forge,
        client: ApiClient,
        job: str,
        name: str,
        network: str,
        make_pod_dir: Callable[[str], Path],
        start_supervisor: StartSupervisor,
        max_replacements: int,
    ) -> None:
        self._children = children
        self._forge = forge
        self._client = client
        self._job = job
        self._name = name
        self._network = network
        self._make_pod_dir = make_pod_dir
        self._start_supervisor = start_supervisor
        self._replacements_left = max_replacements
        self._num_wanted = 0
        self._num_kept = 0
        """Pods made or being made, without those that will end."""
        self._num_given_up = 0
        """Places that stay empty: the budget of replacements is used up."""
        self._num_made = 0
        self._num_quick_ends = 0
        self._stopping = asyncio.Event()
        self._pods: list[Pod] = []

    async def run(self, num_pods: int) -> None:
        """Keep as many pods as the job needs until cancelled or told to stop.

        Args:
            num_pods: pods to begin with; from then on the api says how many.

        Raises:
            CliError: pods end as soon as they are made.
        """
        self._num_wanted = num_pods
        async with asyncio.TaskGroup() as group:
            self._fill(group)
            group.create_task(self._follow_demand(group))

    def stop(self) -> None:
        """Make no more pods: whatever ends from now on was meant to."""
        self._stopping.set()

    async def wait_ended(self) -> None:
        """Wait until all processes of all pods have ended by themselves."""
        ends: list[Awaitable[object]] = []
        for pod in self._pods:
            ends += [asyncio.shield(pod.supervisor.ended), asyncio.shield(pod.launcher.ended)]
        await asyncio.gather(*ends)

    def _fill(self, group: asyncio.TaskGroup) -> None:
        """Make the pods that are missing; those that will end are not counted."""
        while not self._stopping.is_set() and self._num_kept < self._num_wanted:
            self._num_kept += 1
            group.create_task(self._keep_one(group))

    async def _follow_demand(self, group: asyncio.TaskGroup) -> None:
        """Bring about what the api wants: more pods, or the end of some."""
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_S)
            try:
                wanted = await self._client.fetch(self._job, "pods")
            except ApiError as error:
                logger.debug("how many pods are wanted is not known: %s", error)
                continue
            if wanted["state"] in TERMINAL:
                continue
            self._num_wanted = int(wanted["num_pods"]) - self._num_given_up
            for pod in self._pods:
                if pod.uid in wanted["leaving"]:
                    self._let_go(pod)
                if pod.uid in wanted["ending"] and not pod.told_to_end:
                    self._let_go(pod)
                    pod.told_to_end = True
                    pod.supervisor.signal_group(signal.SIGTERM)
            self._fill(group)

    def _let_go(self, pod: Pod) -> None:
        """Do not count a pod any more: it will end, or has."""
        if not pod.let_go:
            pod.let_go = True
            self._num_kept -= 1

    async def _keep_one(self, group: asyncio.TaskGroup) -> None:
        """Make a pod, see it end, and have another one made if it was still wanted."""
        pod = await self._make_pod()
        self._pods.append(pod)
        if self._stopping.is_set():
            return
        await self._watch(pod)
        as_told = await self._ended_as_told(pod)
        if as_told and await self._is_job_over():
            return
        evidence = "its work was handed over" if as_told else _evidence(pod)
        killed = await self._was_killed(pod)
        pod.kill()
        self._pods.remove(pod)
        if self._stopping.is_set():
            return
        if as_told or pod.let_go:
            logger.info("pod %s has left: %s", pod.name, evidence)
        else:
            self._count_end(pod, killed=killed)
            logger.warning("pod %s is gone: %s", pod.name, evidence)
        await self._tell_gone(pod, evidence)
        self._children.reap_orphans()
        if not (as_told or pod.let_go):
            self._take_replacement()
        self._let_go(pod)
        self._fill(group)

    async def _watch(self, pod: Pod) -> None:
        """Wait until a pod is over; meanwhile start launchers again that end with an error."""
        while True:
            ends = [pod.supervisor.ended, pod.launcher.ended]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if pod.supervisor.ended.done() or await self._forge.exit_code(pod.uid) == 0:
                return
            await asyncio.wait([pod.supervisor.ended], timeout=RELAUNCH_AFTER_S)
            over = pod.supervisor.ended.done() or self._stopping.is_set() or pod.let_go
            if over or self._replacements_left == 0:
                return
            self._replacements_left -= 1
            self._count_end(pod, killed=await self._was_killed(pod))
            logger.warning("pod %s: %s; another one is started", pod.name, _evidence(pod))
            try:
                pod.launcher = await self._forge.launch(pod.uid, pod.directory, pod.address)
            except RemoteProtocolError as error:
                raise CliError(str(error), ExitCode.FAILED) from error
            pod.started_s = time.monotonic()

    def _take_replacement(self) -> None:
        """Take one replacement from the budget; without any left a place stays empty."""
        if self._replacements_left == 0:
            logger.warning("no more pods are made: the budget of replacements is used up")
            self._num_given_up += 1
            self._num_wanted -= 1
        else:
            self._replacements_left -= 1

    async def _is_job_over(self) -> bool:
        """Whether a pod that left as it was told did so because the job has ended."""
        while not self._stopping.is_set():
            try:
                wanted = await self._client.fetch(self._job, "pods")
                return wanted["state"] in TERMINAL
            except ApiError:
                await asyncio.sleep(TELL_AGAIN_S)
        return True

    async def _ended_as_told(self, pod: Pod) -> bool:
        """Return whether the pod left because the job is over or its work was handed over.

        Both halves then exit with 0.
        """
        if not pod.supervisor.ended.done() and await self._forge.exit_code(pod.uid) == 0:
            await asyncio.shield(pod.supervisor.ended)
        return pod.supervisor.ended.done() and pod.supervisor.ended.result() == 0

    async def _make_pod(self) -> Pod:
        self._num_made += 1
        number = self._num_made
        uid = f"{self._name}-{number}-{secrets.token_hex(3)}"
        name = f"{self._name}-{number}"
        # .1 belongs to the run itself, and 254 addresses last: the oldest pods are long gone.
        address = f"{self._network}.{2 + (number - 1) % 252}"
        directory = self._make_pod_dir(uid)
        supervisor = self._start_supervisor(uid, name, address)
        try:
            launcher = await self._forge.launch(uid, directory, address)
        except RemoteProtocolError as error:
            supervisor.signal_group(signal.SIGKILL)
            raise CliError(str(error), ExitCode.FAILED) from error
        return Pod(uid, name, address, directory, supervisor, launcher)

    async def _was_killed(self, pod: Pod) -> bool:
        """Whether a pod's end came from outside, as an injected fault's: it could have lived."""
        if pod.supervisor.ended.done():
            return pod.supervisor.ended.result() == -signal.SIGKILL
        return await self._forge.exit_code(pod.uid) == -signal.SIGKILL

    def _count_end(self, pod: Pod, *, killed: bool) -> None:
        quick = not killed and time.monotonic() - pod.started_s < QUICK_END_S
        self._num_quick_ends = self._num_quick_ends + 1 if quick else 0
        if self._num_quick_ends >= MAX_QUICK_ENDS:
            log = pod.directory / "supervisor.log"
            raise CliError(
                f"pods end as soon as they start; the last one said: {last_line(log)} (see {log})",
                ExitCode.FAILED,
            )

    async def _tell_gone(self, pod: Pod, evidence: str) -> None:
        """Tell the api until it has heard: a fault is a state, not an event."""
        fact = PodGone(
            pod=PodUid(pod.uid),
            evidence=evidence,
            observed_at_s=time.time(),
        )
        while not self._stopping.is_set():
            try:
                await self._client.post_facts(self._job, [fact])
            except ApiError as error:
                # A job that is unknown was lost with the store: its supervisors restore it.
                if error.is_answer and error.failure is not Failure.UNKNOWN:
                    logger.debug("the api needs no fact of %s: %s", pod.name, error)
                    return
                await asyncio.sleep(TELL_AGAIN_S)
            else:
                return


def _evidence(pod: Pod) -> str:
    if not pod.supervisor.ended.done():
        return f"its launcher (pid {pod.launcher.pid}) ended"
    code = pod.supervisor.ended.result()
    how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
    return f"its supervisor (pid {pod.supervisor.pid}) ended {how}"
