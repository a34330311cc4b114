"""Injected faults on Redis and the api: carried out here, where both were started.

No rank takes part, so the step is looked up at the api and the fault comes at it
or a little later. It is recorded before it is carried out, like any other. While
the api cannot be asked nothing is due; a fault that was due is carried out once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from typing import Any

from mainstay_cli.base.client import ApiClient
from mainstay_cli.local.services import Services
from mainstay_core.base import codec
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.faults.points import FaultAction, FaultPoint, View
from mainstay_core.wire.api import ApiError

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at the job while a fault waits."""
IDLE_POLL_S = 2.0
"""Between two looks while none does: one may be given to the running job, and each look takes
processor time that is the job's."""
RECORD_AGAIN_S = 0.2


class ProcessFaults:
    """Carries out the faults on the processes of the control plane.

    Args:
        client: the api, while it lives.
        job: uid of the job.
        services: what is broken.
    """

    def __init__(self, client: ApiClient, job: str, services: Services) -> None:
        self._client = client
        self._job = job
        self._services = services
        self._done: set[str] = set()

    async def run(self) -> None:
        """Look after the job's faults, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                waiting = False
                try:
                    listed = list(await self._client.fetch(self._job, "faults"))
                    ours = [fault for entry in listed if (fault := self._open(entry))]
                    step = int((await self._client.fetch(self._job))["step"]) if ours else 0
                except (ApiError, RemoteProtocolError) as error:
                    logger.debug("faults on processes wait: %s", error)
                else:
                    view = View(fired=tuple(f["id"] for f in listed if f["fired"]))
                    due = [fault for fault in ours if fault.is_due(step, view)]
                    self._done.update(fault.id for fault in due)
                    for fault in due:
                        group.create_task(self._inject(fault))
                    waiting = len(ours) > len(due)
                await asyncio.sleep(POLL_S if waiting else IDLE_POLL_S)

    def _open(self, entry: dict[str, Any]) -> FaultPoint | None:
        """Return a listed fault if it is one of ours and was not carried out yet."""
        if entry["process"] is None or entry["fired"] or entry["id"] in self._done:
            return None
        return codec.decode(FaultPoint, entry)

    async def _inject(self, fault: FaultPoint) -> None:
        await asyncio.sleep(fault.delay_ms / 1000)
        if not await self._record(fault):
            return
        assert fault.process is not None
        # The user asked for it: not a warning, which says that something is wrong.
        logger.info("injecting %s: %s %s", fault.id, fault.action, fault.process)
        if fault.action is FaultAction.FLUSH:
            await self._services.flush()
        elif fault.action is FaultAction.KILL:
            await self._services.signal(fault.process, signal.SIGKILL)
        else:
            assert fault.for_s is not None
            child = await self._services.signal(fault.process, signal.SIGSTOP)
            await asyncio.sleep(fault.for_s)
            child.signal_group(signal.SIGCONT)

    async def _record(self, fault: FaultPoint) -> bool:
        """Return whether the fault is to be carried out; asks until it is told."""
        assert fault.process is not None
        while True:
            try:
                await self._client.fire_process_fault(
                    self._job, fault.id, fault.process, time.time()
                )
            except ApiError as error:
                if error.is_answer:
                    logger.warning("fault %s is not injected: %s", fault.id, error)
                    return False
                await asyncio.sleep(RECORD_AGAIN_S)
            else:
                return True
