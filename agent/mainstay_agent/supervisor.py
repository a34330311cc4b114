"""The supervisor of one pod: the shell of :class:`mainstay_core.supervisor.pod.Pod`.

It owns the pod's Unix socket (launcher and trainers), the gather server (quorums
that meet here) and the client of the api. This module turns frames and time into
calls, and actions into frames. Without the api training goes on: requests wait, plans
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
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from mainstay_agent import local_socket
from mainstay_agent.api_client import ApiClient
from mainstay_agent.gather import GatherServer
from mainstay_agent.gossip import PlanGossip
from mainstay_agent.health_file import HealthFile
from mainstay_agent.injection import Injector, is_stopped
from mainstay_agent.local_socket import Peer
from mainstay_agent.network_cut import NetworkCut
from mainstay_agent.processes import Processes
from mainstay_agent.settings import SupervisorSettings
from mainstay_agent.snapshots.store import SegmentStore
from mainstay_core.base import codec
from mainstay_core.base.bounds import Name
from mainstay_core.base.errors import RemoteProtocolError
from mainstay_core.base.frames import Frame, pack_json
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.supervisor.events import (
    Crashed,
    Ended,
    Exited,
    FactSeen,
    Fork,
    Forked,
    Forward,
    Hello,
    LeaveRequested,
    Signal,
    SocketEnded,
    StatusSeen,
    StopTrainers,
    Tick,
)
from mainstay_core.supervisor.held_job import held_job_of
from mainstay_core.supervisor.leaving import EXIT_TERMINATED
from mainstay_core.supervisor.machine import readiness
from mainstay_core.supervisor.pod import Pod
from mainstay_core.supervisor.state import SlotPhase, SlotState
from mainstay_core.wire.api import ApiRefused, ApiUnavailable, HeldJob, Registration
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import PodRegistration, SlotStatus, read_rank_fact
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import Outline
from mainstay_core.wire.stores import STORE_STATUS_S

logger = logging.getLogger(__name__)

CHECK_POLL_S = 0.5
"""How often it is looked whether a check of the store of segments is done."""
FLUSH_S = 2.0
"""At the end, how long facts and ledger entries may take to be heard."""
LOG_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Supervisor(Pod):
    """One pod's supervisor; ``run`` returns its exit code."""

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._pod = PodUid(settings.pod)
        self._network = NetworkCut()
        self._client = ApiClient(settings, self._network)
        super().__init__(JobUid(settings.job), self._pod, settings.num_slots, self._client)
        secret = settings.read_secret()
        self._gossip = PlanGossip(lambda: self.state.plan, self.learn_passed, secret)
        self._gather = GatherServer(lambda: self._network.is_cut, self._gossip.answer, secret)
        self._gather_address = ""
        self._segments: SegmentStore | None = None
        """None in a job without snapshots."""
        self._may_register = asyncio.Event()
        """Set once all that a registration names is there."""
        self._processes = Processes(settings, self._network)
        self._injector = Injector(
            self._client, self.conversation, settings.pod, self._processes, self.spawn
        )
        self._client.on_fault = self._injector.on_event
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        # Wall clock at the start, then the monotonic one: comparable, and never jumping.
        self._clock_offset_s = time.time() - time.monotonic()

    async def run(self) -> int:
        """Serve until the job is over or this pod is told to end.

        Raises:
            OSError: the pod's address or directory cannot be used.
            InvalidSpecError: there is no memory for the store of segments.
            ApiRefused: the api does not accept this pod.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: self.feed(LeaveRequested("told to end by SIGTERM"))
        )
        loop.add_signal_handler(
            signal.SIGINT, lambda: self.feed(Ended("told to end by a signal", EXIT_TERMINATED))
        )
        if self._settings.parent_fd is not None:
            loop.add_reader(self._settings.parent_fd, self._processes.watch_parent)
        self._gather_address = await self._gather.start(self._settings.address)
        server = await local_socket.listen(self._settings.socket, self)
        self.spawn(HealthFile(self._settings.pod_dir, lambda: readiness(self.state)).run())
        if self._settings.snapshot_memory:
            self.spawn(self._keep_segments(self._settings))
        else:
            self._may_register.set()
        try:
            code = await self._leaving
            await self._say_goodbye()
            return code
        finally:
            server.close()
            if self._segments is not None:
                self._segments.close()
            for task in tuple(self._tasks):
                task.cancel()
            await self._gather.close()
            await self._client.close()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with the supervisor, which ends if the task fails."""
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

    async def work(self) -> None:
        # A pod whose memory for segments is not there is given no place.
        await self._may_register.wait()
        await super().work()
        if self._segments is not None:
            self.spawn(self._tell_store(self._segments))

    async def _keep_segments(self, settings: SupervisorSettings) -> None:
        """Run the pod's store of segments."""

        def make() -> SegmentStore:
            return SegmentStore(
                job=JobUid(settings.job),
                pod=self._pod,
                address=settings.address,
                path=settings.snapshot_socket,
                memory_bytes=settings.snapshot_memory,
                secret=settings.read_secret(),
                is_cut=lambda: self._network.is_cut,
            )

        self._segments = await asyncio.to_thread(make)
        self._may_register.set()
        await asyncio.to_thread(self._segments.serve)

    async def _tell_store(self, store: SegmentStore) -> None:
        """Tell the api every few seconds what the pod's store holds, for ever.

        It is for people. What is not heard is not told again: the next status says as much.
        """
        wanted = heard = 0
        while True:
            status = await asyncio.wrap_future(store.ask(wanted))
            checked = status.checked
            if checked is not None and checked.number <= heard:
                status = replace(status, checked=None)
            try:
                reply = await self._client.post_store(status)
            except (ApiUnavailable, ApiRefused, RemoteProtocolError) as error:
                logger.debug("the status of the store of segments is not told: %s", error)
                await asyncio.sleep(STORE_STATUS_S)
                continue
            heard = checked.number if checked is not None else heard
            wanted = max(wanted, reply.check)
            if reply.doubts is not None:
                store.doubt(reply.doubts)
            await asyncio.sleep(CHECK_POLL_S if wanted > heard else STORE_STATUS_S)

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                if self.conversation.registered is not None:
                    await self.conversation.wait_told()
        self._processes.send_launcher({"kind": "stop"})

    # What a pod asks of its shell.

    def now_s(self) -> float:
        """Return the wall clock, which never jumps."""
        return time.monotonic() + self._clock_offset_s

    def draw_nonce(self) -> str:
        """Return random text."""
        return secrets.token_hex(4)

    def log(self, reason: str) -> None:
        """Log why something was decided."""
        if reason:
            logger.info("%s", reason)

    def hold(self, plan: Plan) -> None:
        """A newer plan is held: the api, and members that missed it, hear of it."""
        self._client.held = plan.quorum
        self._gather.hold(plan)
        registered = self.conversation.registered
        config = registered.config.snapshots if registered is not None else None
        if self._segments is not None and config is not None:
            self._segments.adopt(plan, peers=config.peers, domains=config.domains)

    def call_later(self, delay_s: float, call: Callable[[Plan], None], plan: Plan) -> None:
        """Call after ``delay_s``."""
        asyncio.get_running_loop().call_later(delay_s, call, plan)

    def offer_to(self, address: str, plan: Plan) -> None:
        """Begin a conversation with another supervisor."""
        if not self._network.is_cut:
            self.spawn(self._gossip.offer(address, plan))

    def wake_at(self, due_s: float | None) -> None:
        """Feed a Tick then."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            # A little late rather than early: a tick before its time would come again and again.
            delay_s = max(0.0, due_s - self.now_s()) + 0.001
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.feed, Tick())

    def send_trainers(self, action: Forward | StopTrainers) -> None:
        """Send a plan, or the word to stop."""
        if isinstance(action, Forward):
            # Not made anew: a plan of many members would take milliseconds.
            frame = pack_json(f'{{"kind":"plan","plan":{self._client.json_of(action.plan)}}}')
            self._processes.send_packed(action.slots, frame)
        else:
            self._processes.send_trainers(action.slots, {"kind": "stop"})

    def send_launcher(self, action: Fork | Signal) -> None:
        """Have the launcher fork or signal a trainer."""
        if isinstance(action, Fork):
            assert self.conversation.registered is not None
            config = self.conversation.registered.config
            self._processes.fork(action.slot, action.incarnation, config)
        else:
            head = {"kind": "signal", "slot": action.slot, "signal": action.number}
            self._processes.send_launcher(head)

    async def wait_quiet(self) -> None:
        """Wait until nobody meets here: whoever does has not moved on without this pod."""
        await self._gather.wait_quiet()

    def leave(self, exit_code: int) -> None:
        """End with this code."""
        if not self._leaving.done():
            self._leaving.set_result(exit_code)

    def welcomed(self, answer: Registration) -> None:
        """Take up the job's injected faults."""
        if answer.config.snapshots is not None and self._segments is None:
            logger.error("the job has snapshots, but this pod was started without memory for them")
        self._processes.add_faults(answer.config.faults)

    def held_job(self) -> HeldJob | None:
        """Return what is held of the job, with its injected faults."""
        processes, registered = self._processes, self.conversation.registered
        since = self.conversation.approximate_since
        return held_job_of(self.state, registered, processes.faults, processes.fired, since)

    def status_of(self, slot: SlotState) -> SlotStatus:
        """Return a slot's line in the heartbeat."""
        told = slot.status if slot.phase is SlotPhase.UP else None
        if told is not None and told.pid and is_stopped(told.pid):
            # Sure evidence, from the kernel: the process cannot say so itself.
            return replace(told, phase="stopped", waiting=False)
        return super().status_of(slot)

    # Launcher and trainers (local_socket.Peers).

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        """Turn a frame into an event."""
        if peer.is_launcher:
            self._on_launcher_frame(frame)
        elif peer.incarnation is not None:
            self._on_trainer_frame(peer, peer.incarnation, frame)
        elif frame.kind == "launcher-hello":
            self._on_launcher(peer)
        elif frame.kind == "hello":
            self._on_hello(peer, frame)
        elif frame.kind == "crash":
            self._on_crash(frame)
        elif frame.kind == "check":
            peer.send({"kind": "checked", "why_not": readiness(self.state)})
        else:
            raise RemoteProtocolError(f"{frame.kind!r} before hello")

    def on_end(self, peer: Peer) -> None:
        """Turn the end of a connection into an event."""
        if peer is self.launcher:
            self._processes.launcher = None
            self.launcher_left()
        elif peer.incarnation is not None:
            self._processes.drop_trainer(peer)
            self.feed(SocketEnded(peer.slot, peer.incarnation))

    def _on_launcher(self, peer: Peer) -> None:
        if self.launcher is None:
            peer.is_launcher = True
            self._processes.launcher = peer
        self.launcher_came(peer)

    def _on_launcher_frame(self, frame: Frame) -> None:
        head = frame.head
        if frame.kind == "leaving":
            self.feed(LeaveRequested("told to end by SIGTERM"))
            return
        slot, incarnation = int(head["slot"]), Incarnation(head["incarnation"])
        if frame.kind == "forked":
            self.feed(Forked(slot, incarnation, int(head["pid"])))
        elif frame.kind == "exited":
            self.feed(Exited(slot, incarnation, head.get("code"), head.get("signal")))
        else:
            raise RemoteProtocolError(f"unknown kind {frame.kind!r}")

    def _on_hello(self, peer: Peer, frame: Frame) -> None:
        slot, incarnation = int(frame.head["slot"]), Incarnation(frame.head["incarnation"])
        self.check_hello(slot, incarnation)
        peer.slot, peer.incarnation = slot, incarnation
        self._processes.trainers[slot] = peer
        pid = int(frame.head["pid"])
        fingerprint = {str(k): str(v) for k, v in frame.head.get("fingerprint", {}).items()}
        self._processes.tell_faults(slot)
        outline = codec.decode(Outline, frame.head.get("outline", []))
        accelerator = codec.decode(Name, frame.head.get("accelerator", ""))
        self.feed(Hello(slot, incarnation, pid, fingerprint, outline, accelerator))

    def _on_crash(self, frame: Frame) -> None:
        slot, incarnation = int(frame.head["slot"]), Incarnation(frame.head["incarnation"])
        self.feed(Crashed(slot, incarnation, codec.decode(Crash, frame.head["crash"])))

    def _on_trainer_frame(self, peer: Peer, incarnation: Incarnation, frame: Frame) -> None:
        head = frame.head
        if frame.kind == "status":
            status = codec.decode(SlotStatus, {**head, "index": peer.slot, "pid": peer.pid})
            status = replace(status, incarnation=incarnation)
            self.feed(StatusSeen(peer.slot, incarnation, status))
        elif frame.kind == "fact":
            self.feed(FactSeen(peer.slot, incarnation, read_rank_fact(head["fact"])))
        elif frame.kind == "ledger":
            entry = codec.decode(LedgerEntry, head["entry"])
            self.record(peer.slot, incarnation, entry, post=bool(head.get("post")))
        elif frame.kind == "finding":
            self._on_finding(peer, incarnation, codec.decode(Finding, head["finding"]))
        elif frame.kind == "crash":
            self.feed(Crashed(peer.slot, incarnation, codec.decode(Crash, head["crash"])))
        elif frame.kind == "plan":
            self.learn_passed(codec.decode(Plan, head["plan"]))
        elif frame.kind == "fault-point":
            self._injector.on_fault_point(peer.slot, head)
        elif frame.kind == "log":
            level = LOG_LEVELS.get(str(head.get("level")), logging.INFO)
            logger.log(level, "slot %d: %s", peer.slot, head.get("text"))
        else:
            raise RemoteProtocolError(f"unknown kind {frame.kind!r}")

    def _on_finding(self, peer: Peer, incarnation: Incarnation, finding: Finding) -> None:
        slot = Slot(pod=self._pod, index=peer.slot)
        if finding.slot != slot:
            raise RemoteProtocolError(f"slot {slot} tells a finding of slot {finding.slot}")
        self.note_finding(finding, incarnation, time.time())

    def registration(self) -> PodRegistration:
        """Return what the pod introduces itself with."""
        return PodRegistration(
            pod=self._pod,
            name=self._settings.pod_name,
            address=self._settings.address,
            gather=self._gather_address,
            num_slots=self._settings.num_slots,
            domain=self._settings.domain,
            pid=os.getpid(),
            snapshots=self._segments.address if self._segments is not None else "",
            supervisor=self._client.supervisor,
        )
