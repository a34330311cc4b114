"""Real trainers, the real coordinator, and a test that holds the strings.

Trainers are forked processes with real sockets; plans are made by the coordinator's state
machine in the test's process. A trainer halts at named points between any two instructions of the
protocol (``POINTS``) until the test kills, stops or resumes it. What is left out here (supervisor,
api, Redis) is tested elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.train import points
from tests.train.crew import ADDRESS, Crew, Worker
from tests.train.quorum import Outcome
from tests.worlds.facts import make_fact

from mainstay_agent.gather import GatherServer
from mainstay_core.base import codec
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import Incarnation, PodUid, Slot
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    EndJob,
    Event,
    FactsReported,
    JobSubmitted,
    PodRegistered,
    PublishPlan,
    StepsCommitted,
    Tick,
)
from mainstay_core.coordinator.intake.facts import UnregisteredPodError
from mainstay_core.coordinator.invariants import check_invariants
from mainstay_core.dmr.findings import Finding
from mainstay_core.gather.server import Send
from mainstay_core.job.config import JobConfig
from mainstay_core.job.phase import JobPhase
from mainstay_core.wire.facts import Fact, FactKind, PodRegistration, read_rank_fact
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Member, Method, Plan

GIVE_UP_S = 60.0
"""A scenario this long hangs."""
TICK_S = 0.02
SILENCE_S = 1e6
"""More than any heartbeat timeout."""


@dataclass(eq=False, slots=True)
class Life:
    """One process of a trainer, and the pod it lives on."""

    name: str
    pod: PodUid
    worker: Worker
    line: asyncio.StreamWriter | None = None
    dead: bool = False
    silent: bool = False
    """Its pod is cut off from the coordinator."""
    points: list[str] = field(default_factory=list)
    """Where it halted, in order."""
    computed: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(step, types) of every list it worked through or began."""
    compares: dict[int, bool] = field(default_factory=dict)
    """By step, whether it executed its kernels twice."""
    parked: Fact | None = None

    @property
    def slot(self) -> Slot:
        return Slot(pod=self.pod, index=0)


class CuttingServer(GatherServer):
    """A gather server that can die in the middle of its answer, and cut single connections."""

    cut_key = "no key"
    """Key whose answer reaches one member only; then the room is dead."""
    cut_to = -1

    def cut(self, quorum: str, index: int) -> None:
        """End one member's connection, as a reset does."""
        self._protocol._rooms[quorum].members[index].end()

    def _perform(self, actions: Any) -> None:
        for action in actions:
            if not isinstance(action, Send) or getattr(action.message, "key", "") != self.cut_key:
                super()._perform([action])
                continue
            self.cut_key = "no key"
            members = {self._protocol._members[each].index: each for each in action.to}
            super()._perform([Send((members[self.cut_to],), action.message)])
            for connection in action.to:
                connection.end()


class PlayedSupervisors:
    """One job. ``run`` plays a scenario beside it and returns what the job left.

    Args:
        crew: forks the trainers.
        directory: for the Unix socket.
        config: the job; one slot per pod.
        spares: trainers beside those that the replicas need.
        reserves: processes that are started by :meth:`restart` only.
        halts: by life (``life0``, ...): the points at which it halts.
    """

    def __init__(
        self,
        crew: Crew,
        directory: Path,
        config: JobConfig,
        *,
        spares: int = 0,
        reserves: int = 0,
        halts: dict[str, Iterable[str]] | None = None,
    ) -> None:
        self.config = config
        self._path = str(directory / "s")
        self._halts = {name: tuple(wanted) for name, wanted in (halts or {}).items()}
        number = config.shape.num_ranks + spares
        workers = [crew.fork(points.run_life, config, self._path) for _ in range(number + reserves)]
        self.lives = {
            f"life{i}": Life(f"life{i}", PodUid(f"pod{i}"), workers[i]) for i in range(number)
        }
        self._reserves = workers[number:]
        self.gather = CuttingServer()
        self.state = machine.initial(config, time.time())
        self.outcome = Outcome()
        self.findings: list[tuple[str, Finding]] = []
        """What lives have told of wrong results."""
        self.corrected: list[tuple[str, LedgerEntry]] = []
        """Entries of the ledger that lives have told in the place of one of a bad state."""
        self.end: EndJob | None = None
        self._nonces = iter(range(10**6))
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gather_address = ""

    # The scenario's strings -------------------------------------------------

    def member(self, replica: int, stage: int) -> Member:
        """The member that is this rank in the newest plan."""
        return next(
            m for m in self.plan.members if (m.rank.replica, m.rank.stage) == (replica, stage)
        )

    def life(self, replica: int, stage: int) -> Life:
        """The life that is this rank in the newest plan."""
        return self.lives[self.member(replica, stage).incarnation]

    @property
    def plan(self) -> Plan:
        assert self.state.plan is not None
        return self.state.plan

    @property
    def method(self) -> Method | None:
        """How the newest plan came to be; None before the first."""
        return self.state.plan.method if self.state.plan else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; it is looked at after everything that happens."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def at(self, life: Life | str, point: str) -> Life:
        """Wait until a life halts at a point."""
        found = self.lives[life] if isinstance(life, str) else life
        await self.until(lambda: point in found.points)
        return found

    async def committed(self, step: int) -> None:
        """Wait until a step is in the ledger, of all stages."""
        await self.until(lambda: self.state.step > step)

    def resume(self, life: Life) -> None:
        """Let a halted life go on."""
        life.worker.say("resume")

    def kill(self, *lives: Life) -> None:
        """SIGKILL; told to the coordinator as one fact each, together."""
        for life in lives:
            life.dead = True
            life.worker.signal(signal.SIGKILL)
        facts = [self._fact(life, FactKind.TRAINER_DOWN, evidence="killed") for life in lives]
        self.tell(*facts)

    def stop(self, life: Life) -> None:
        """SIGSTOP; nobody is told."""
        life.worker.signal(signal.SIGSTOP)

    def proceed(self, life: Life) -> None:
        """SIGCONT, with its halt resumed."""
        life.worker.signal(signal.SIGCONT)

    def silence(self, life: Life) -> None:
        """Its pod is not heard any more: excluded by its heartbeat's age."""
        life.silent = True
        self._feed(Tick(behind_s={life.pod: SILENCE_S}))

    def hear(self, life: Life) -> None:
        """Its pod is heard again: as a supervisor does that was told that it is unknown."""
        life.silent = False
        self._register(life)
        self.tell(self._fact(life, FactKind.TRAINER_UP, fingerprint={}))
        self._send(life, self.plan)

    def restart(self, life: Life) -> Life:
        """Another trainer on the same slot; the coordinator learns of it by its hello alone."""
        name = f"{life.name}b"
        new = Life(name, life.pod, self._reserves.pop(0))
        self.lives[name] = new
        self._start(new)
        return new

    def submit(self, **changed: Any) -> None:
        """The job's definition comes again, with other settings."""
        self._feed(JobSubmitted(config=dataclasses.replace(self.state.config, **changed)))

    def tell(self, *facts: Fact) -> None:
        self._feed(FactsReported(facts=facts))

    # The run ----------------------------------------------------------------

    async def run(self, scenario: Callable[[PlayedSupervisors], Awaitable[None]]) -> Outcome:
        """Play the scenario until the job has ended."""
        hang = ""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                try:
                    await self._run(scenario)
                except asyncio.CancelledError:
                    hang = self._describe()
                    raise
                finally:
                    for life in self.lives.values():
                        life.worker.signal(signal.SIGKILL)
        except TimeoutError as error:
            raise AssertionError(f"hangs: {hang}") from error
        return self.outcome

    async def _run(self, scenario: Callable[[PlayedSupervisors], Awaitable[None]]) -> None:
        self._gather_address = await self.gather.start(ADDRESS)
        server = await asyncio.start_unix_server(self._serve, self._path)
        ticking = asyncio.create_task(self._tick())
        playing = asyncio.create_task(scenario(self))
        ended = asyncio.create_task(self.until(lambda: self.end is not None))
        try:
            for life in tuple(self.lives.values()):
                self._register(life)
                self._start(life)
            waiting: set[asyncio.Task[Any]] = {ticking, playing, ended}
            while not (ended.done() and playing.done()):
                done, waiting = await asyncio.wait(
                    {*waiting, *self._tasks}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                waiting -= self._tasks
        finally:
            for task in (ticking, playing, ended, *self._tasks):
                task.cancel()
            server.close()
            await self.gather.close()
        assert self.end is not None
        assert self.end.state is JobPhase.COMPLETE, self.end.reason
        for final in self.state.finals:
            self.outcome.final[self._position_of(final)].add(final)

    def _start(self, life: Life) -> None:
        life.worker.say(
            points.Start(life=life.name, pod=life.pod, halts=self._halts.get(life.name, ()))
        )
        asyncio.get_running_loop().add_reader(life.worker.pipe.fileno(), self._hear_pipe, life)

    def _hear_pipe(self, life: Life) -> None:
        try:
            message = life.worker.hear()
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(life.worker.pipe.fileno())
            return
        if isinstance(message, points.At):
            life.points.append(message.point)
        elif isinstance(message, points.Computes):
            life.computed.append((message.step, message.types))
            life.compares[message.step] = message.compares
        self._notify()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            parked = [x.parked for x in self.lives.values() if x.parked and not x.dead]
            current = [f for f in parked if f.quorum and f.quorum.id >= self._newest()]
            silent = {x.pod for x in self.lives.values() if x.silent}
            for fact in current:
                if fact.pod not in silent:
                    self.tell(fact)
            self._feed(Tick())

    def _newest(self) -> int:
        return self.state.plan.quorum.id if self.state.plan else 0

    def _register(self, life: Life) -> None:
        self._feed(
            PodRegistered(
                registration=PodRegistration(
                    pod=life.pod,
                    name=life.pod,
                    address=ADDRESS,
                    gather=self._gather_address,
                    num_slots=1,
                )
            )
        )

    def _feed(self, event: Event) -> None:
        if self.state.terminal:
            return
        outcome = machine.step(self.state, event, time.time(), f"n{next(self._nonces)}")
        self.state = outcome.state
        check_invariants(self.state)
        for action in outcome.actions:
            if isinstance(action, PublishPlan):
                self.outcome.plans.append(action.plan)
                for life in self.lives.values():
                    self._send(life, action.plan)
            elif isinstance(action, EndJob):
                self.end = action
        self._notify()

    def _send(self, life: Life, plan: Plan) -> None:
        if life.line is not None and not life.dead and not life.silent:
            with contextlib.suppress(ConnectionResetError):
                life.line.write(pack({"kind": "plan", "plan": codec.encode(plan)}))

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fact(self, life: Life, kind: FactKind, **more: Any) -> Fact:
        who = {"pod": life.pod, "slot": 0, "incarnation": Incarnation(life.name)}
        return make_fact(kind, **who, **more)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        parser, life = FrameParser(), None
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(1 << 16):
                for frame in parser.feed(data):
                    if frame.kind == "hello":
                        life = self.lives[frame.head["incarnation"]]
                        life.line = writer
                        self._on_hello(life)
                    else:
                        assert life is not None
                        self._on_frame(life, frame)
        if life is not None and not life.dead and self.end is None:
            life.dead = True
            self.tell(self._fact(life, FactKind.TRAINER_DOWN, evidence="its socket ended"))

    def _on_hello(self, life: Life) -> None:
        if self.state.plan is not None:
            self.tell(self._fact(life, FactKind.TRAINER_UP, fingerprint={}))
            self._send(life, self.plan)
        elif all(x.line is not None for x in self.lives.values()):
            # Told together: the spares are then the last ones, however fast each process was.
            up = [self._fact(x, FactKind.TRAINER_UP, fingerprint={}) for x in self.lives.values()]
            self.tell(*up)

    def _on_frame(self, life: Life, frame: Frame) -> None:
        if frame.kind == "ledger":
            entry = codec.decode(LedgerEntry, frame.head["entry"])
            if entry.corrects:
                self.corrected.append((life.name, entry))
            if not any(
                point.startswith("corrupt-state") for point in self._halts.get(life.name, ())
            ):
                self._record(entry)
        elif frame.kind == "finding":
            self.findings.append((life.name, codec.decode(Finding, frame.head["finding"])))
        elif frame.kind == "fact":
            fact = read_rank_fact(frame.head["fact"])
            self.outcome.facts.append(fact)
            if fact.kind is FactKind.PARKED:
                life.parked = fact
            if not life.silent:
                try:
                    self.tell(fact)
                except UnregisteredPodError:
                    self.hear(life)
                    self.tell(fact)

    def _record(self, entry: LedgerEntry) -> None:
        """Every cell's entry of a step must say the same, whoever computed what.

        One in the place of a void step has other bits.
        """
        position = self._position_of(entry)
        known = self.outcome.entries.setdefault((entry.step, position), entry)
        for void in self.plan.voided:
            if known.quorum.id < void.quorum <= entry.quorum.id and entry.step >= void.version:
                known = self.outcome.entries[entry.step, position] = entry
        for what in ("masters", "gradient", "data", "loss", "norm", "tokens"):
            said, before = getattr(entry, what), getattr(known, what)
            assert said == before, f"{what} of step {entry.step}: {said}, not {before}"
        positions = range(len(self.config.shape.positions))
        entries = [self.outcome.entries.get((entry.step, p)) for p in positions]
        if all(entries) and entry.quorum.id <= self._newest():
            self._feed(
                StepsCommitted(step=entry.step, quorum=entry.quorum, committed_at_s=time.time())
            )

    def _position_of(self, said: LedgerEntry | FinalDigests) -> int:
        return said.stage * self.config.shape.ranks_per_stage + said.inner

    def _describe(self) -> str:
        for life in self.lives.values():
            if not life.dead:
                life.worker.signal(signal.SIGUSR1)  # its stacks go to stderr
                time.sleep(0.2)
        lives = "; ".join(f"{x.name} dead={x.dead} at={x.points}" for x in self.lives.values())
        return (
            f"{self.state.phase} step {self.state.step}, {len(self.outcome.plans)} plans, "
            f"settled {self.state.settled_at_s}, waiting {self.state.waiting}; {lives}"
        )
