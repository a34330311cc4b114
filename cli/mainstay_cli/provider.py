"""The local process provider: makes pods as processes and sees them end.

It stands in for the operator: it makes no recovery decision. It tells the api
what it knows for certain (a pod is gone) and refills the pool, as a Deployment
would. A pod is two process groups, its supervisor's and its launcher's with the
trainers; when either ends the whole pod counts as gone and the rest is killed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from mainstay_cli.client import ApiClient, ApiError
from mainstay_cli.exits import CliError, ExitCode
from mainstay_cli.family import Child, Family
from mainstay_cli.forge import Forge
from mainstay_cli.redis_server import last_line
from mainstay_core.errors import RemoteProtocolError
from mainstay_core.facts import Fact, FactKind
from mainstay_core.ids import PodUid

logger = logging.getLogger(__name__)

QUICK_END_S = 5.0
"""A pod that ends sooner than this hardly did any work."""
MAX_QUICK_ENDS = 5
"""So many in a row mean that pods cannot live here; the run ends with the reason."""
TELL_AGAIN_S = 0.5


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
    started_s: float = field(default_factory=time.monotonic)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal both process groups."""
        self.supervisor.signal_group(number)
        self.launcher.signal_group(number)


StartSupervisor = Callable[[str, str, str], Child]
"""Starts the supervisor of (uid, name, address)."""


class LocalProvider:
    """Keeps ``num_pods`` pods alive until told to stop.

    Args:
        family: owns the processes.
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
        family: Family,
        forge: Forge,
        client: ApiClient,
        job: str,
        name: str,
        network: str,
        make_pod_dir: Callable[[str], Path],
        start_supervisor: StartSupervisor,
        max_replacements: int,
    ) -> None:
        self._family = family
        self._forge = forge
        self._client = client
        self._job = job
        self._name = name
        self._network = network
        self._make_pod_dir = make_pod_dir
        self._start_supervisor = start_supervisor
        self._replacements_left = max_replacements
        self._num_made = 0
        self._num_quick_ends = 0
        self._stopping = asyncio.Event()
        self._pods: list[Pod] = []

    async def run(self, num_pods: int) -> None:
        """Make the pods and keep their number until cancelled or told to stop.

        Raises:
            CliError: pods end as soon as they are made.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(num_pods):
                group.create_task(self._keep_one())

    def stop(self) -> None:
        """Make no more pods: whatever ends from now on was meant to."""
        self._stopping.set()

    async def wait_ended(self) -> None:
        """Wait until all processes of all pods have ended by themselves."""
        ends: list[Awaitable[object]] = []
        for pod in self._pods:
            ends += [asyncio.shield(pod.supervisor.ended), asyncio.shield(pod.launcher.ended)]
        await asyncio.gather(*ends)

    async def _keep_one(self) -> None:
        """Keep one place of the pool filled."""
        while not self._stopping.is_set():
            pod = await self._make_pod()
            self._pods.append(pod)
            if self._stopping.is_set():
                return
            await asyncio.wait(
                [pod.supervisor.ended, pod.launcher.ended], return_when=asyncio.FIRST_COMPLETED
            )
            if await self._ended_as_told(pod):
                return
            evidence = _evidence(pod)
            pod.kill()
            self._pods.remove(pod)
            if self._stopping.is_set():
                return
            self._count_end(pod)
            logger.warning("pod %s is gone: %s", pod.name, evidence)
            await self._tell_gone(pod, evidence)
            self._family.reap_orphans()
            if self._replacements_left == 0:
                logger.warning("no more pods are made: the budget of replacements is used up")
                return
            self._replacements_left -= 1

    async def _ended_as_told(self, pod: Pod) -> bool:
        """Return whether the pod left because the job is over: both halves then exit with 0."""
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

    def _count_end(self, pod: Pod) -> None:
        quick = time.monotonic() - pod.started_s < QUICK_END_S
        self._num_quick_ends = self._num_quick_ends + 1 if quick else 0
        if self._num_quick_ends >= MAX_QUICK_ENDS:
            log = pod.directory / "supervisor.log"
            raise CliError(
                f"pods end as soon as they start; the last one said: {last_line(log)} (see {log})",
                ExitCode.FAILED,
            )

    async def _tell_gone(self, pod: Pod, evidence: str) -> None:
        """Tell the api until it has heard: a fault is a state, not an event."""
        fact = Fact(
            kind=FactKind.POD_GONE,
            pod=PodUid(pod.uid),
            evidence=evidence,
            observed_at_s=time.time(),
        )
        while not self._stopping.is_set():
            try:
                await self._client.post_facts(self._job, [fact])
            except ApiError as error:
                if 400 <= error.status < 500:
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
