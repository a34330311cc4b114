"""The supervisor of one pod: a shell around :mod:`mainstay_core.supervisor.machine`.

It owns the pod's Unix socket (launcher and trainers), the gather server (quorums
that meet here) and the conversation with the api. Decisions are the state
machine's; this module turns frames, answers and time into events, and actions
into frames and requests. Without the api training goes on: requests wait, plans
that are held stay in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from mainstay_agent import local_socket
from mainstay_agent.api_client import ApiClient, ApiRefused, Registration
from mainstay_agent.api_connection import ApiLine, slot_status
from mainstay_agent.gather import GatherServer
from mainstay_agent.gossip import PlanPassing
from mainstay_agent.held_plan import restoration_of
from mainstay_agent.injection import Injector
from mainstay_agent.local_socket import Peer
from mainstay_agent.network_cut import NetworkCut
from mainstay_agent.outbox import FactOutbox, LedgerOutbox
from mainstay_agent.processes import Processes
from mainstay_agent.settings import SupervisorSettings
from mainstay_core.base import codec
from mainstay_core.base.errors import LocalProtocolError, RemoteProtocolError
from mainstay_core.base.frames import Frame
from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.job.config import JobConfig
from mainstay_core.supervisor.events import (
    Action,
    Committed,
    Ended,
    Event,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    HeartbeatDue,
    Hello,
    LauncherLost,
    LauncherUp,
    LeaveAcknowledged,
    LeaveRequested,
    PlanReceived,
    Registered,
    Release,
    SendFact,
    Signal,
    SlotPhase,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    SupervisorLimits,
    Tick,
)
from mainstay_core.supervisor.leaving import EXIT_TERMINATED
from mainstay_core.supervisor.machine import initial, next_due_s, readiness, step
from mainstay_core.wire.facts import (
    Fact,
    Heartbeat,
    Leaving,
    PodRegistration,
    SlotStatus,
    read_rank_fact,
)
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan

logger = logging.getLogger(__name__)

FLUSH_S = 2.0
"""At the end, how long facts and ledger entries may take to be heard."""
LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Supervisor:
    """One pod's supervisor; ``run`` returns its exit code."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._pod = PodUid(settings.pod)
        self._state = initial(self._pod, settings.num_slots)
        self._network = NetworkCut()
        self._client = ApiClient(settings, self._network)
        self._line = ApiLine(self._client, self._feed)
        secret = settings.read_secret()
        stands = lambda: self._line.stands  # noqa: E731
        self._passing = PlanPassing(
            self._pod, self._network, self._on_passed_plan, self._spawn, stands, secret
        )
        self._gather = GatherServer(lambda: self._network.is_cut, self._passing.answer, secret)
        self._gather_address = ""
        self._facts = FactOutbox(
            self._client,
            lambda plan: self._feed(PlanReceived(plan)),
            self._register_again,
            self._on_heard,
        )
        self._ledger = LedgerOutbox(self._client, self._register_again)
        self._processes = Processes(settings, self._network)
        self._injector = Injector(self._client, settings.pod, self._processes, self._spawn)
        self._store = ""
        self._launcher_known = asyncio.Event()
        self._registered: Registration | None = None
        self._registering = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        # Wall clock at the start, then the monotonic one: comparable, and never jumping.
        self._clock_offset_s = time.time() - time.monotonic()

    async def run(self) -> int:
        """Serve until the job is over or this pod is told to end.

        Raises:
            OSError: the pod's address or directory cannot be used.
            ApiRefused: the api does not accept this pod.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: self._feed(LeaveRequested("told to end by SIGTERM"))
        )
        loop.add_signal_handler(
            signal.SIGINT, lambda: self._feed(Ended("told to end by a signal", EXIT_TERMINATED))
        )
        if self._settings.parent_fd is not None:
            loop.add_reader(self._settings.parent_fd, self._processes.watch_parent)
        self._gather_address = await self._gather.start(self._settings.address)
        server = await local_socket.listen(self._settings.socket, self)
        try:
            self._spawn(self._work())
            code = await self._leaving
            await self._say_goodbye()
            return code
        finally:
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await self._gather.close()
            await self._client.close()

    async def _work(self) -> None:
        await self._launcher_known.wait()
        config = await self._register()
        for coroutine in (
            self._facts.run(),
            self._ledger.run(),
            self._line.beat(
                self._heartbeat, self._register_again, self._passing.offer, config.heartbeat_s
            ),
            self._line.follow_stream(self._injector.on_event),
        ):
            self._spawn(coroutine)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or self._leaving.done():
            return
        error = task.exception()
        assert error is not None
        self._leaving.set_exception(error)

    def _on_heard(self, fact: Fact) -> None:
        if isinstance(fact, Leaving):
            self._feed(LeaveAcknowledged())

    async def _end_when_quiet(self) -> None:
        """Whoever still meets here has not moved on to the plan without this pod."""
        await self._gather.wait_quiet()
        self._feed(Ended("its work is handed over"))

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                if self._registered is not None:
                    await self._facts.wait_empty()
                    await self._ledger.wait_empty()
        self._processes.send_launcher({"kind": "stop"})

    # The state machine.

    def _now_s(self) -> float:
        return time.monotonic() + self._clock_offset_s

    def _feed(self, event: Event) -> None:
        held = self._state.plan
        done = step(self._state, event, self._now_s(), secrets.token_hex(4))
        self._state = done.state
        if done.state.plan is not None and done.state.plan is not held:
            self._hold(done.state.plan)
        if done.reason:
            logger.info("%s", done.reason)
        for action in done.actions:
            self._act(action)
        self._set_timer()

    def _hold(self, plan: Plan) -> None:
        """A newer plan is held: the api, members that missed it and neighbours hear of it."""
        self._client.held = plan.quorum
        self._gather.hold(plan)
        self._passing.hold(plan)

    def _on_passed_plan(self, plan: Plan) -> None:
        if plan.job == self._settings.job:
            self._feed(PlanReceived(plan))
        else:
            logger.warning("a plan of job %s was passed on to this one", plan.job)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = next_due_s(self._state)
        if due_s is not None:
            # A little late rather than early: a tick before its time would come again and again.
            delay_s = max(0.0, due_s - self._now_s()) + 0.001
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self._feed, Tick())

    def _act(self, action: Action) -> None:
        if isinstance(action, SendFact):
            self._facts.put(action.fact)
        elif isinstance(action, Forward):
            head = {"kind": "plan", "plan": codec.encode(action.plan)}
            self._processes.send_trainers(action.slots, head)
        elif isinstance(action, StopTrainers):
            self._processes.send_trainers(action.slots, {"kind": "stop"})
        elif isinstance(action, Fork):
            assert self._registered is not None
            self._processes.fork(action.slot, action.incarnation, self._registered.config)
        elif isinstance(action, Signal):
            head = {"kind": "signal", "slot": action.slot, "signal": action.number}
            self._processes.send_launcher(head)
        elif isinstance(action, Release):
            self._spawn(self._end_when_quiet())
        elif not self._leaving.done():
            self._leaving.set_result(action.exit_code)

    # Launcher and trainers (local_socket.Peers).

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Turn a frame into an event."""
        if peer.is_launcher:
            self._on_launcher_frame(frame)
        elif peer.incarnation is not None:
            self._on_trainer_frame(peer, peer.incarnation, frame)
        elif frame.kind == "launcher-hello":
            self._on_launcher(peer, frame)
        elif frame.kind == "hello":
            self._on_hello(peer, frame)
        elif frame.kind == "check":
            peer.send({"kind": "checked", "why_not": readiness(self._state)})
        else:
            raise RemoteProtocolError(f"{frame.kind!r} before hello")

    def on_end(self, peer: Peer) -> None:
        """Turn the end of a connection into an event."""
        if peer is self._processes.launcher:
            self._processes.launcher = None
            self._feed(LauncherLost())
        elif peer.incarnation is not None:
            self._processes.drop_trainer(peer)
            self._feed(SocketEnded(peer.slot, peer.incarnation))

    def _on_launcher(self, peer: Peer, frame: Frame) -> None:
        if self._processes.launcher is not None:
            raise RemoteProtocolError("there is a launcher already")
        peer.is_launcher = True
        self._processes.launcher = peer
        self._store = str(frame.head["store"])
        self._launcher_known.set()
        if self._registered is None:
            self._feed(LauncherUp())
        else:
            self._spawn(self._welcome(peer))

    async def _welcome(self, launcher: Peer) -> None:
        """Another launcher: nothing is forked before the api knows of its rendezvous store."""
        await self._register_again()
        if self._processes.launcher is launcher:
            self._feed(LauncherUp())

    def _on_launcher_frame(self, frame: Frame) -> None:
        head = frame.head
        if frame.kind == "leaving":
            self._feed(LeaveRequested("told to end by SIGTERM"))
            return
        slot, incarnation = int(head["slot"]), Incarnation(head["incarnation"])
        if frame.kind == "forked":
            self._feed(Forked(slot, incarnation, int(head["pid"])))
        elif frame.kind == "exited":
            self._feed(Exited(slot, incarnation, head.get("code"), head.get("signal")))
        else:
            raise RemoteProtocolError(f"unknown kind {frame.kind!r}")

    def _on_hello(self, peer: Peer, frame: Frame) -> None:
        slot, incarnation = int(frame.head["slot"]), Incarnation(frame.head["incarnation"])
        if not 0 <= slot < len(self._state.slots):
            raise RemoteProtocolError(f"there is no slot {slot}")
        expected = self._state.slots[slot]
        if expected.incarnation != incarnation or expected.phase is not SlotPhase.FORKING:
            raise RemoteProtocolError(f"{incarnation} is not the trainer that slot {slot} awaits")
        peer.slot, peer.incarnation = slot, incarnation
        self._processes.trainers[slot] = peer
        pid = int(frame.head["pid"])
        fingerprint = {str(k): str(v) for k, v in frame.head.get("fingerprint", {}).items()}
        self._processes.tell_faults(slot)
        self._feed(Hello(slot, incarnation, pid, fingerprint))

    def _on_trainer_frame(self, peer: Peer, incarnation: Incarnation, frame: Frame) -> None:
        head = frame.head
        if frame.kind == "status":
            status = codec.decode(SlotStatus, {**head, "index": peer.slot, "pid": peer.pid})
            status = replace(status, incarnation=incarnation)
            self._feed(StatusSeen(peer.slot, incarnation, status))
        elif frame.kind == "fact":
            self._feed(FactSeen(peer.slot, incarnation, read_rank_fact(head["fact"])))
        elif frame.kind == "ledger":
            entry = codec.decode(LedgerEntry, head["entry"])
            self._ledger.put(entry, post=bool(head.get("post")))
            with contextlib.suppress(LocalProtocolError):
                self._feed(Committed(peer.slot, incarnation))
        elif frame.kind == "plan":
            self._on_passed_plan(codec.decode(Plan, head["plan"]))
        elif frame.kind == "fault-point":
            self._injector.on_fault_point(peer.slot, head)
        elif frame.kind == "log":
            level = LOG_LEVELS.get(str(head.get("level")), logging.INFO)
            logger.log(level, "slot %d: %s", peer.slot, head.get("text"))
        else:
            raise RemoteProtocolError(f"unknown kind {frame.kind!r}")

    async def _register(self) -> JobConfig:
        before = self._registered
        async with self._registering:
            answer = await self._line.register(self._registration(), self._restoration)
        self._registered, config = answer, answer.config
        if before is not None and before.restored_at_s != answer.restored_at_s:
            self._ledger.repeat()
        settings = SupervisorLimits(
            max_restarts=config.max_restarts,
            hang_s=config.hang_s,
            silence_s=config.heartbeat_timeout_s,
            handover_s=config.handover_s,
        )
        self._processes.add_faults(config.faults)
        self._feed(Registered(settings))
        return config

    async def _register_again(self) -> None:
        """Introduce the pod anew: its store has moved, or the api has forgotten it."""
        try:
            await self._register()
        except ApiRefused as refusal:
            # Training does not end because the api has lost the job.
            logger.error("registration refused: %s", refusal)

    def _restoration(self) -> dict[str, Any] | None:
        """What is held of the job; nothing once it has ended: that must not be undone."""
        if self._registered is None or self._state.ending:
            return None
        return restoration_of(
            self._state, self._registered, self._processes.faults, self._processes.fired
        )

    def _registration(self) -> PodRegistration:
        return PodRegistration(
            pod=self._pod,
            name=self._settings.pod_name,
            address=self._settings.address,
            gather=self._gather_address,
            store=self._store,
            num_slots=self._settings.num_slots,
            domain=self._settings.domain,
            pid=os.getpid(),
            supervisor=self._client.supervisor,
        )

    def _heartbeat(self) -> Heartbeat:
        self._feed(HeartbeatDue())
        plan = self._state.plan
        return Heartbeat(
            pod=self._pod,
            slots=tuple(slot_status(slot) for slot in self._state.slots),
            quorum=None if plan is None else plan.quorum,
        )
