"""Holds a Lease, or waits for it: has the API server's answers judged and writes what follows."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from typing import Any

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.logs import about
from mainstay_operator.kube import KubeClient, KubeError
from mainstay_operator.leadership import (
    Candidate,
    LeaseRecord,
    LeaseTiming,
    Step,
    Verdict,
    read_lease,
    show_lease,
)
from mainstay_operator.metrics import Metrics

logger = logging.getLogger(__name__)

JITTER = 0.2
"""Share of a pause by which it is longer at random: those who wait do not all ask at once."""


class LeadershipLostError(MainstayError):
    """This process led and leads no more: it ends, and begins anew as one who waits."""


class Elector:
    """One process that would lead.

    Args:
        kube: client of the Kubernetes API for the Lease alone: its requests wait for no others.
        lease: namespace and name of the Lease.
        identity: of this process; no other one has it.
        timing: of the Lease.
        metrics: shows whether this process leads.
    """

    def __init__(
        self,
        kube: KubeClient,
        lease: tuple[str, str],
        identity: str,
        timing: LeaseTiming,
        metrics: Metrics,
    ) -> None:
        self._kube = kube
        self._namespace, self._name = lease
        self._candidate = Candidate(identity=identity, timing=timing)
        self._metrics = metrics
        self._lost = ""
        self._told: tuple[object, ...] = ()

    def forbid(self) -> str:
        """Return why this process must not act now; '' if it leads."""
        if self._lost:
            return self._lost
        return "" if self._candidate.left_s(time.monotonic()) else "this operator does not lead"

    async def acquire(self) -> None:
        """Wait until this process leads.

        Raises:
            LeadershipLostError: it stood still while its claim was answered: the term is over.
        """
        pause_s = self._candidate.timing.retry_s
        while self.forbid():
            try:
                verdict = await self._look()
                if verdict.step is Step.STOP:
                    raise LeadershipLostError(verdict.reason)
                self._metrics.note_standby()
                seen = self._candidate.seen
                what = (verdict.step, seen.holder if seen is not None else "")
                self._tell("Wait" if verdict.step is Step.WAIT else "Claim", verdict.reason, what)
            except KubeError as error:
                self._tell("Wait", str(error), (error.status, error.code), logging.WARNING)
            if self.forbid():
                await asyncio.sleep(pause_s * (1 + JITTER * random.random()))
        self._metrics.leader.set(1)
        self._tell("Lead", f"{self._candidate.identity} leads from now on")

    async def hold(self) -> str:
        """Renew the Lease for as long as that succeeds; return why this process leads no more."""
        try:
            self._lost = await self._renew()
        except TimeoutError:
            renew_s = self._candidate.timing.renew_s
            self._lost = f"the Lease could not be renewed for {renew_s:g} s"
        self._metrics.leader.set(0)
        return self._lost

    async def _renew(self) -> str:
        """Renew the Lease until somebody else has it; return who.

        Raises:
            TimeoutError: it was not renewed in time.
        """
        while True:
            async with asyncio.timeout(self._candidate.left_s(time.monotonic())):
                await asyncio.sleep(self._candidate.timing.retry_s)
                try:
                    verdict = await self._look()
                except KubeError as error:
                    logger.warning("the Lease is not renewed: %s", error)
                    continue
            if verdict.step is Step.STOP:
                return verdict.reason

    async def release(self) -> None:
        """Give the Lease back, if this process leads: the next one takes it at once."""
        if self.forbid():
            return
        self._lost = "the Lease is given back"
        self._metrics.leader.set(0)
        try:
            body = await self._kube.fetch("leases", self._namespace, self._name)
            found = read_lease(body)
            if found is None or found.holder != self._candidate.identity:
                return
            await self._write(body, self._candidate.release(time.time()))
        except KubeError as error:
            logger.warning("the Lease is not given back, its term runs out: %s", error)
        else:
            self._tell("Release", self._lost)

    async def _look(self) -> Verdict:
        """Read the Lease and do what follows from it.

        Raises:
            KubeError: the API server refused, or did not answer.
        """
        body = await self._kube.fetch("leases", self._namespace, self._name)
        now_s = time.monotonic()
        self._candidate = self._candidate.after_look(read_lease(body), now_s)
        verdict = self._candidate.decide(now_s)
        if verdict.step is Step.CLAIM:
            sent_at_s = time.monotonic()
            written = await self._write(body, self._candidate.claim(time.time()))
            if written is not None:
                self._candidate = self._candidate.after_claim(written, sent_at_s)
        return verdict

    async def _write(self, body: dict[str, Any] | None, record: LeaseRecord) -> LeaseRecord | None:
        """Write the Lease over the version that was read; None if somebody was faster."""
        metadata: dict[str, Any] = {"namespace": self._namespace, "name": self._name}
        whole = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        spec = show_lease(record)
        if body is None:
            return read_lease(await self._kube.create({**whole, "spec": spec}))
        return read_lease(await self._kube.replace({**whole, **body, "spec": spec}))

    def _tell(
        self,
        decision: str,
        reason: str,
        what: tuple[object, ...] = (),
        level: int = logging.INFO,
    ) -> None:
        """Log what was decided; not again and again, while it is about the same."""
        if not what or what != self._told:
            logger.log(level, "%s", reason, extra=about(decision=decision))
        self._told = what


async def await_turn(elector: Elector, ended: asyncio.Event) -> bool:
    """Wait until this process leads; return False if it is told to end before."""
    if await is_done_before(elector.acquire(), ended):
        return True
    await elector.release()
    return False


async def is_done_before(work: Coroutine[Any, Any, None], ended: asyncio.Event) -> bool:
    """Do work unless ``ended`` is set before it is done; return whether it is done."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        waiting.cancel()
    if ended.is_set():
        return False
    working.result()
    return True


async def run_as_leader(elector: Elector, work: Coroutine[Any, Any, None]) -> None:
    """Work for as long as this process leads, and give the Lease back after it.

    Raises:
        LeadershipLostError: it leads no more. The work is not waited for: it must not go on.
    """
    holding, working = asyncio.create_task(elector.hold()), asyncio.create_task(work)
    await asyncio.wait([holding, working], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
        raise LeadershipLostError(holding.result())
    holding.cancel()
    await working
    await elector.release()
