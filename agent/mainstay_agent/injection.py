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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mainstay_agent.api_client import ApiClient
from mainstay_core.base import codec
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.supervisor.conversation import Conversation
from mainstay_core.wire.api import ApiRefused

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
    for_s: float | None = None
    """How long a stop or a cut of the network lasts; None is for ever."""


class Victims(Protocol):
    """The processes of a pod that a fault can kill, as the supervisor reaches them."""

    fired: set[str]
    """Ids of the faults that were carried out here."""

    def signal_trainer(self, slot: int, number: int) -> None:
        """Send a signal to the trainer of a slot."""

    def kill_pod(self) -> None:
        """Kill every process of the pod, this one included."""

    def resume(self, slot: int, fault: str) -> None:
        """Tell a halted trainer to go on."""

    async def disconnect(self, for_s: float) -> None:
        """Cut the pod's network; returns when it is back."""

    def add_faults(self, faults: tuple[FaultPoint, ...]) -> None:
        """Let the trainers know of faults, those of now and those to come."""

    def keep_flip(self, slot: int, fault: str) -> None:
        """Have a flip that stays in a slot's device outlive its trainer."""

    def add_fired(self, fault: str) -> None:
        """Let the trainers know that a fault fires: others wait for it."""


class Injector:
    """Carries out a supervisor's injected faults.

    Args:
        client: where they are recorded.
        conversation: repeats the record until it is answered.
        pod: whose supervisor this is.
        victims: what can be hit.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self,
        client: ApiClient,
        conversation: Conversation,
        pod: str,
        victims: Victims,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._client, self._conversation = client, conversation
        self._pod = pod
        self._victims = victims
        self._spawn = spawn

    def on_fault_point(self, slot: int, head: dict[str, Any]) -> None:
        """A trainer has reached a fault, and unless it has a delay, waits there."""
        self._victims.keep_flip(slot, str(head["fault"]))
        self._inject(
            Reached(
                fault=str(head["fault"]),
                action=FaultAction(head["action"]),
                slot=slot,
                rank=head.get("rank"),
                delay_s=float(head.get("delay_ms", 0.0)) / 1000,
                for_s=head.get("for_s"),
            )
        )

    def on_event(self, name: str, data: str) -> None:
        """Take an event of the job's stream.

        Raises:
            RemoteProtocolError: it cannot be read.
        """
        if name == "faults":
            self._victims.add_faults(codec.loads(tuple[FaultPoint, ...], data))
            return
        told = codec.loads(dict[str, Any], data)
        if name == "fired":
            self._victims.add_fired(str(told["fault"]))
        elif told.get("pod") == self._pod:
            # A spare has no phases of its own: the api says when.
            self._inject(
                Reached(
                    fault=str(told["id"]),
                    action=FaultAction(told["action"]),
                    slot=int(told.get("slot", 0)),
                    delay_s=float(told.get("delay_ms", 0.0)) / 1000,
                    for_s=told.get("for_s"),
                )
            )

    def _inject(self, reached: Reached) -> None:
        self._spawn(self._carry_out_once(reached))

    async def _carry_out_once(self, reached: Reached) -> None:
        """Carry out a fault, once in the life of its job."""
        if reached.delay_s > 0:
            await asyncio.sleep(reached.delay_s)
        victims = self._victims

        async def record() -> bool:
            return await self._client.post_fired(
                reached.fault, pod=self._pod, slot=reached.slot, rank=reached.rank, at_s=time.time()
            )

        try:
            first = await self._conversation.until_answered(record, f"fault {reached.fault}")
        except ApiRefused as refusal:
            logger.error("fault %s is not injected: %s", reached.fault, refusal)
            first = False
        if not first:
            victims.resume(reached.slot, reached.fault)
            return
        logger.warning("injecting %s: %s", reached.fault, reached.action)
        victims.fired.add(reached.fault)
        await _carry_out(reached, victims)


async def _carry_out(reached: Reached, victims: Victims) -> None:
    if reached.action is FaultAction.KILL_TRAINER:
        victims.signal_trainer(reached.slot, signal.SIGKILL)
    elif reached.action is FaultAction.KILL_POD:
        victims.kill_pod()
    elif reached.action is FaultAction.STOP:
        victims.signal_trainer(reached.slot, signal.SIGSTOP)
        # Read only if somebody continues it: then it goes on instead of halting for ever.
        victims.resume(reached.slot, reached.fault)
        if reached.for_s is not None:
            await asyncio.sleep(reached.for_s)
            victims.signal_trainer(reached.slot, signal.SIGCONT)
    elif reached.action is FaultAction.DISCONNECT:
        cut = asyncio.ensure_future(victims.disconnect(reached.for_s or 0.0))
        # One turn of the loop: the trainers are told of the cut before one is told to go on.
        await asyncio.sleep(0)
        victims.resume(reached.slot, reached.fault)
        await cut
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
