"""Pods as processes: each is two process groups, its supervisor's and its launcher's with trainers.

This module does for local pods what a kubelet does. It starts a launcher again that ends with an
error. When the supervisor ends, the whole pod has ended, and the rest of it is killed.
:mod:`mainstay_cli.local.pool` decides how many pods there are.
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

from mainstay_cli.base.exits import CliError, ExitCode
from mainstay_cli.local.forge import Forge
from mainstay_cli.local.processes import Child
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.ids import PodUid
from mainstay_core.pool.observed import ObservedPod, PodPhase

logger = logging.getLogger(__name__)

RELAUNCH_AFTER_S = 0.2
"""Between two launchers of a pod; if its supervisor ends meanwhile, the pod has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOutcome:
    """The end of a pod."""

    by_itself: bool
    """Both halves exited with code 0: the job has ended, or the pod's work was handed over."""
    evidence: str
    killed: bool
    """Something outside of the pod ended it, as an injected fault does: it could have lived on."""
    at_s: float
    """Wall clock."""
    lifetime_s: float
    """Since its newest launcher started."""


@dataclass(slots=True, eq=False)
class Pod:
    """One pod: its identity, its place and its two processes."""

    uid: PodUid
    name: str
    index: int
    address: str
    directory: Path
    """By a path that is short enough for Unix sockets in it."""
    supervisor: Child
    launcher: Child | None = None
    """None until the forge has forked it."""
    made_at_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)
    """When its newest launcher started."""
    told_for: str = ""
    """Why it was told to end; empty if it was not."""
    ends_by_s: float = 0.0
    end: PodOutcome | None = None

    def lifetime_s(self) -> float:
        """Return the seconds since the newest launcher started."""
        return time.monotonic() - self.started_s

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal both process groups."""
        self.supervisor.signal_group(number)
        if self.launcher is not None:
            self.launcher.signal_group(number)

    def tell_to_end(self, why: str, within_s: float) -> None:
        """Send SIGTERM to the supervisor, which hands the pod's work over before it ends."""
        self.told_for, self.ends_by_s = why, time.time() + within_s
        self.supervisor.signal_group(signal.SIGTERM)

    def observe(self) -> ObservedPod:
        """Return the pod as decisions take it."""
        end = self.end
        phase = PodPhase.RUNNING if self.launcher is not None else PodPhase.PENDING
        if end is not None:
            phase = PodPhase.SUCCEEDED if end.by_itself else PodPhase.FAILED
        terminating = bool(self.told_for) and end is None
        return ObservedPod(
            uid=self.uid,
            name=self.name,
            index=self.index,
            phase=phase,
            ready=phase is PodPhase.RUNNING,
            terminating=terminating,
            ends_by_s=self.ends_by_s if terminating else 0.0,
            ended_for=self.told_for,
            failure=end.evidence if end is not None and not end.by_itself else "",
            evidence=end.evidence if end is not None else "",
            ended_at_s=end.at_s if end is not None else 0.0,
            created_at_s=self.made_at_s,
        )

    def evidence(self) -> str:
        """Return how the process ended whose end is the pod's."""
        if not self.supervisor.ended.done():
            assert self.launcher is not None
            return f"its launcher (pid {self.launcher.pid}) ended"
        code = self.supervisor.ended.result()
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"its supervisor (pid {self.supervisor.pid}) ended {how}"


StartSupervisor = Callable[[str, str, str], Awaitable[Child]]
"""Starts the supervisor of (uid, name, address); raises RemoteProtocolError where it cannot."""
MayRelaunch = Callable[[Pod, bool], bool]
"""Says whether a pod gets another launcher, given whether the last one was killed from outside."""


class Kubelet:
    """Makes pods and sees them end.

    Args:
        forge: forks the launchers.
        name: of the job; pods are named after it.
        network: first three bytes of the pods' addresses, ``127.x.y``.
        make_pod_dir: makes a pod's directory.
        start_supervisor: starts a supervisor process.
    """

    def __init__(
        self,
        *,
        forge: Forge,
        name: str,
        network: str,
        make_pod_dir: Callable[[str], Path],
        start_supervisor: StartSupervisor,
    ) -> None:
        self._forge = forge
        self._name = name
        self._network = network
        self._make_pod_dir = make_pod_dir
        self._start_supervisor = start_supervisor

    async def make(self, index: int) -> Pod:
        """Start a pod's supervisor and return the pod; :meth:`run` starts the rest of it.

        Raises:
            CliError: the supervisor cannot be started.
        """
        name = f"{self._name}-{index}"
        uid = f"{name}-{secrets.token_hex(3)}"
        # .1 belongs to the run itself, and 254 addresses last: the oldest pods are long gone.
        address = f"{self._network}.{2 + (index - 1) % 252}"
        directory = self._make_pod_dir(uid)
        try:
            supervisor = await self._start_supervisor(uid, name, address)
        except RemoteProtocolError as error:
            raise CliError(str(error), ExitCode.FAILED) from error
        return Pod(PodUid(uid), name, index, address, directory, supervisor)

    async def run(self, pod: Pod, may_relaunch: MayRelaunch) -> None:
        """Run a pod to its end, which is noted in it.

        Raises:
            CliError: the forge forks no launcher.
        """
        await self._launch(pod)
        await self._watch(pod, may_relaunch)
        at_s, lifetime_s = time.time(), pod.lifetime_s()
        by_itself = await self._has_ended_by_itself(pod)
        pod.end = PodOutcome(
            by_itself=by_itself,
            evidence="its work was handed over" if by_itself else pod.evidence(),
            killed=self._was_killed(pod),
            at_s=at_s,
            lifetime_s=lifetime_s,
        )
        if not by_itself:
            pod.kill()

    @staticmethod
    def _was_killed(pod: Pod) -> bool:
        """Return whether the process that ended first was killed from outside."""
        assert pod.launcher is not None
        first = pod.supervisor if pod.supervisor.ended.done() else pod.launcher
        return first.ended.result() == -signal.SIGKILL

    async def _launch(self, pod: Pod) -> None:
        try:
            pod.launcher = await self._forge.launch(
                pod.uid,
                pod_dir=str(pod.directory),
                socket=str(pod.directory / "supervisor.sock"),
            )
        except RemoteProtocolError as error:
            pod.supervisor.signal_group(signal.SIGKILL)
            raise CliError(str(error), ExitCode.FAILED) from error
        pod.started_s = time.monotonic()

    async def _watch(self, pod: Pod, may_relaunch: MayRelaunch) -> None:
        """Wait until a pod has ended; meanwhile start launchers again that end with an error."""
        while True:
            assert pod.launcher is not None
            ends = [pod.supervisor.ended, pod.launcher.ended]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if pod.supervisor.ended.done() or pod.launcher.ended.result() == 0:
                return
            await asyncio.wait([pod.supervisor.ended], timeout=RELAUNCH_AFTER_S)
            if pod.supervisor.ended.done() or not may_relaunch(pod, self._was_killed(pod)):
                return
            logger.warning("pod %s: %s; another one is started", pod.name, pod.evidence())
            await self._launch(pod)

    @staticmethod
    async def _has_ended_by_itself(pod: Pod) -> bool:
        """Return whether both halves exit with code 0."""
        assert pod.launcher is not None
        if not pod.supervisor.ended.done() and pod.launcher.ended.result() == 0:
            await asyncio.shield(pod.supervisor.ended)
        return pod.supervisor.ended.done() and pod.supervisor.ended.result() == 0
