"""Injected faults: recorded at the api first, then carried out from outside the victim.

A trainer that reaches a fault's point says so and, unless the fault has a delay,
halts there: what is killed is killed exactly at the named action (design 13.8).
The record comes before the kill, so a fault never fires twice however the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from mainstay_agent.client import ApiClient, ApiRefused
from mainstay_agent.outbox import until_answered
from mainstay_core.faults import FaultAction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A fault's point was reached."""

    fault: str
    action: FaultAction
    slot: int
    rank: object = None
    """Whatever the trainer says of its rank; None on a spare."""
    delay_s: float = 0.0


class Victims(Protocol):
    """What can be killed: the supervisor's view of its pod."""

    def signal_trainer(self, slot: int, number: int) -> None:
        """Send a signal to the trainer of a slot."""

    def kill_pod(self) -> None:
        """Kill every process of the pod, this one included."""

    def resume(self, slot: int, fault: str) -> None:
        """Tell a halted trainer to go on."""


async def inject(client: ApiClient, pod: str, reached: Reached, victims: Victims) -> None:
    """Carry out a fault, once in the life of its job."""
    if reached.delay_s > 0:
        await asyncio.sleep(reached.delay_s)

    async def record() -> bool:
        return await client.post_fired(
            reached.fault, pod=pod, slot=reached.slot, rank=reached.rank, at_s=time.time()
        )

    try:
        first = await until_answered(record, f"fault {reached.fault}")
    except ApiRefused as refusal:
        logger.error("fault %s is not injected: %s", reached.fault, refusal)
        first = False
    if not first:
        victims.resume(reached.slot, reached.fault)
        return
    logger.warning("injecting %s: %s", reached.fault, reached.action)
    if reached.action is FaultAction.KILL_TRAINER:
        victims.signal_trainer(reached.slot, signal.SIGKILL)
    elif reached.action is FaultAction.KILL_POD:
        victims.kill_pod()
    elif reached.action is FaultAction.STOP:
        victims.signal_trainer(reached.slot, signal.SIGSTOP)
        # Read only if somebody continues it: then it goes on instead of halting for ever.
        victims.resume(reached.slot, reached.fault)
    else:
        victims.resume(reached.slot, reached.fault)


def kill_group(pid: int) -> None:
    """Kill a process and, if it leads a process group, all of that."""
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (by SIGSTOP or a debugger), by /proc/PID/stat."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The name may hold spaces and parentheses: the state follows the last one.
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
