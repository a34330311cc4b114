"""Trainers as forked processes around a small supervisor that also decides: for tests of trainers.

It starts a plan when all are there, masks a cell that died, and lets a spare join at the
next step. No api, no launcher: what remains is what trainers do with plans.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.train.crew import ADDRESS, Crew

from mainstay_agent.gather import GatherServer
from mainstay_core.base import codec
from mainstay_core.base.digest import Digest
from mainstay_core.base.frames import Frame, FrameParser, pack
from mainstay_core.base.ids import QuorumId, RankId, Slot
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import Fact, FactKind, RankFact, read_rank_fact
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.launcher import main

_JOB_NUMBERS = itertools.count()

MODEL = {"dim": 32, "layers": 4, "heads": 2, "kvHeads": 2, "sequence": 16}


def make_config(
    *,
    stages=2,
    lanes=2,
    shards_per_lane=2,
    steps=5,
    dtype="float32",
    recompute=False,
    faults=(),
    checkpoints=None,
    order=Order.IN_ORDER,
) -> JobConfig:
    """A small job: two types per lane, two micro-batches per type."""
    shape = JobShape(
        lanes=lanes,
        shards_per_lane=shards_per_lane,
        replicas=lanes,
        min_replicas=1,
        stages=stages,
        micro_batches=2,
        steps=steps,
        seed=7,
        checkpoint_every_steps=2 if checkpoints else 0,
        order=order,
        cut=Cut.BALANCED if order is Order.IN_ORDER else Cut.EQUAL,
    )
    return JobConfig(
        job="job",
        name="job",
        shape=shape,
        entrypoint="",
        workload={**MODEL, "dtype": dtype},
        device="cpu",
        recompute=recompute,
        bucket_bytes=1,  # a chunk each: a loss may fall between any two
        checkpoint_dir=str(checkpoints or ""),
        faults=tuple(faults),
    )


@dataclass(slots=True)
class Outcome:
    """What a job left behind."""

    entries: dict[tuple[int, int], LedgerEntry] = field(default_factory=dict)
    """By (step, position)."""
    final: dict[int, set[FinalDigests]] = field(default_factory=lambda: defaultdict(set))
    """By position: what its cells say at the end."""
    facts: list[Fact] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)

    def summed(self, what: str) -> list[str]:
        """Digest of ``masters`` or ``gradient`` by step, over all stages."""
        sums = defaultdict(Digest.zero)
        for (step, _), entry in sorted(self.entries.items()):
            sums[step] += Digest.parse(getattr(entry, what))
        return [sums[step].hex() for step in sorted(sums)]

    def certificates(self) -> list[tuple[float, float, int, str]]:
        """(loss, norm, tokens, data) by step."""
        first = [entry for (_, stage), entry in sorted(self.entries.items()) if stage == 0]
        return [(e.loss, e.norm, e.tokens, e.data) for e in first]

    def totals(self) -> dict[str, str]:
        """Digests of everything at the end, over all stages."""
        sums = defaultdict(Digest.zero)
        for stage, said in self.final.items():
            assert len(said) == 1, f"the cells of stage {stage} differ: {said}"
            (final,) = said
            for what in ("params", "masters", "optimizer"):
                sums[what] += Digest.parse(getattr(final, what))
        return {what: total.hex() for what, total in sums.items()}


def run_job(crew: Crew, directory: Path, config: JobConfig, spares: int = 0) -> Outcome:
    """Run a job to its end; injected faults kill their trainer where it halts."""
    path = str(directory / "s")
    shape = config.shape
    workers = [
        crew.fork(_trainer, config, number, path, str(directory))
        for number in range(shape.lanes * shape.stages + spares)
    ]
    supervisor = _Supervisor(config, workers)
    try:
        return asyncio.run(supervisor.run(path))
    finally:
        for worker in workers:
            worker.kill()


def _trainer(pipe, config, number, path, directory):
    pipe.recv()  # the supervisor listens
    settings = TrainerSettings(
        config=config,
        pod=f"pod{number}",
        slot=0,
        incarnation=f"life{number}",
        address=ADDRESS,
        socket=path,
        work_dir=directory,
    )
    os._exit(main.run_trainer(settings))


@dataclass(frozen=True, slots=True)
class _Cell:
    number: int
    replica: int | None
    stage: int
    since: int


class _Supervisor:
    def __init__(self, config, workers):
        self._config, self._workers = config, workers
        self._name = f"job{next(_JOB_NUMBERS)}"
        self._shape = config.shape
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._gather = ""
        self._quorum_id = self._unplanned_id = 0
        self._cells: list[_Cell] = []
        self._formed: dict[int, QuorumId] = {}
        self._spares: list[int] = []
        self._vacant: list[tuple[int, int]] = []
        self._settled: set[int] = set()
        self._finished: set[int] = set()
        self._over: asyncio.Future[None]
        self._serving: set[asyncio.Task[None]] = set()
        self.outcome = Outcome()

    async def run(self, path: str) -> Outcome:
        self._over = asyncio.get_running_loop().create_future()
        gather = GatherServer()
        self._gather = await gather.start(ADDRESS)
        async with await asyncio.start_unix_server(self._serve, path):
            for worker in self._workers:
                worker.say("go")
            await self._over
            for line in self._lines.values():
                line.write(pack({"kind": "stop"}))
            await asyncio.gather(*self._serving)  # until every trainer has ended
        await gather.close()
        return self.outcome

    async def _serve(self, reader, writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        parser, number = FrameParser(), -1
        try:
            while data := await reader.read(1 << 16):
                for frame in parser.feed(data):
                    if frame.kind == "hello":
                        number = int(frame.head["incarnation"].removeprefix("life"))
                        self._lines[number] = writer
                        self._up()
                    else:
                        self._handle(number, frame)
        except ConnectionResetError:
            pass
        except Exception as error:
            self._end(error)
        if not self._over.done():
            self._gone(number)

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _up(self) -> None:
        if len(self._lines) < len(self._workers):
            return
        places = [(r, s) for s in range(self._shape.stages) for r in range(self._shape.lanes)]
        self._cells = [_Cell(n, r, s, 1) for n, (r, s) in enumerate(places)]
        self._spares = list(range(len(places), len(self._workers)))
        self._publish(Method.START)

    def _handle(self, number: int, frame: Frame) -> None:
        if frame.kind == "ledger":
            self._record(codec.decode(LedgerEntry, frame.head["entry"]))
        elif frame.kind == "fact":
            self._learn(number, read_rank_fact(frame.head["fact"]))
        elif frame.kind == "fault-point":
            self.outcome.fired.append(frame.head["fault"])
            self._workers[number].kill()

    def _record(self, entry: LedgerEntry) -> None:
        """Every cell's entry of a step must say the same, whoever computed what."""
        known = self.outcome.entries.setdefault((entry.step, entry.stage), entry)
        for what in ("masters", "gradient", "data", "loss", "norm", "tokens"):
            said, before = getattr(entry, what), getattr(known, what)
            assert said == before, f"{what} of step {entry.step}: {said}, not {before}"

    def _learn(self, number: int, fact: RankFact) -> None:
        self.outcome.facts.append(fact)
        assert fact.kind is not FactKind.FAILED, fact.evidence
        current = fact.quorum is not None and fact.quorum.id == self._quorum_id
        if fact.kind is FactKind.SETTLED and current:
            self._settled.add(number)
            self._finished.discard(number)
            if self._vacant and self._spares and len(self._settled) == len(self._cells):
                self._join()
        elif fact.kind is FactKind.FINISHED and current:
            assert fact.final is not None
            self.outcome.final[fact.final.stage].add(fact.final)
            self._finished.add(number)
            if self._finished == {cell.number for cell in self._cells}:
                self._end()

    def _gone(self, number: int) -> None:
        """Mask: the rest of its chain follows, the others compute its types."""
        self._lines.pop(number, None)
        lost = [cell for cell in self._cells if cell.number == number]
        if not lost:
            return
        (cell,) = lost
        self._cells.remove(cell)
        if cell.replica is not None:
            self._vacant.append((cell.replica, cell.stage))
        self._cells = [
            _Cell(c.number, None if c.replica == cell.replica else c.replica, c.stage, c.since)
            for c in self._cells
        ]
        self._finished.clear()
        self.outcome.final.clear()
        self._publish(Method.MASK)

    def _join(self) -> None:
        """A spare takes the vacant place; followers of the other stages chain with it."""
        replica, stage = self._vacant.pop(0)
        joiner = _Cell(self._spares.pop(0), replica, stage, self._quorum_id + 1)
        for other in range(self._shape.stages):
            if other != stage:
                at = next(
                    i for i, c in enumerate(self._cells) if c.stage == other and c.replica is None
                )
                follower = self._cells[at]
                self._cells[at] = _Cell(follower.number, replica, other, follower.since)
        self._cells.append(joiner)
        self._formed.pop(replica)
        self._publish(Method.JOIN)

    def _publish(self, method: Method) -> None:
        self._quorum_id += 1
        quorum = QuorumId(id=self._quorum_id, nonce=f"{self._name}n{self._quorum_id}")
        if method is not Method.JOIN:
            self._unplanned_id = self._quorum_id
        self._settled = set()
        self._cells.sort(key=lambda c: (c.stage, c.replica is None, c.replica or 0, c.number))
        chains = self._chains(quorum)
        per_lane = self._shape.shards_per_lane
        whole = [chain.replica for chain in chains]
        homes = [t // per_lane for t in range(self._shape.lanes * per_lane)]
        plan = Plan(
            job="job",
            quorum=quorum,
            planned=method is Method.JOIN,
            unplanned_id=self._unplanned_id,
            method=method,
            members=tuple(
                Member(
                    index=i,
                    rank=RankId(replica=c.replica, stage=c.stage),
                    slot=Slot(pod=f"pod{c.number}", index=0),
                    incarnation=f"life{c.number}",
                    address=ADDRESS,
                    since=c.since,
                )
                for i, c in enumerate(self._cells)
            ),
            chains=chains,
            suppliers=tuple(
                h if h in whole else whole[t % len(whole)] for t, h in enumerate(homes)
            ),
            all_reduce_stack=per_lane,
            rendezvous=Rendezvous(pod="pod0", gather=self._gather),
            reason=f"{method} of a test",
            faults_fired=tuple(self.outcome.fired),
        )
        self.outcome.plans.append(plan)
        for line in self._lines.values():
            with contextlib.suppress(ConnectionResetError):
                line.write(pack({"kind": "plan", "plan": codec.encode(plan)}))

    def _chains(self, quorum: QuorumId) -> tuple[Chain, ...]:
        chains = []
        for replica in range(self._shape.lanes):
            cells = tuple(i for i, c in enumerate(self._cells) if c.replica == replica)
            if len(cells) == self._shape.stages:
                formed = self._formed.setdefault(replica, quorum)
                chains.append(Chain(replica=replica, cells=cells, formed_in=formed))
        return tuple(chains)


def kill_at(step: int, phase: str, replica: int, stage: int) -> FaultPoint:
    """A trainer is killed exactly where it is about to do ``phase``."""
    return FaultPoint(
        id=f"{phase}-{step}-r{replica}-s{stage}",
        step=step,
        action=FaultAction.KILL_TRAINER,
        phase=phase,
        replica=replica,
        stage=stage,
    )
