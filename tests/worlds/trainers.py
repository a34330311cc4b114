"""A small world around the rank's real state machine: only IO is simulated.

Trainers run ``rank.step`` and meet in the product's gather, whose messages wait in queues.
Stage groups, pipelines, heals and the disk are a few dictionaries. A coordinator of the
simplest kind masks, mates, joins and re-forms. Who moves next, who fails and what arrives
late is drawn from one seed, so that a failure is repeated by its number.

The bits of a state are a text: the hash of everything applied to it. A gradient's
bits depend on position, step, types and the state it was computed from, so that a
type counted twice, a mixed version or a wrong mark ends in another text. A position
is a stage, or one of the inner ranks of a stage.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from tests.core.plans import make_plan, slot_of
from tests.worlds.gather import Line, PlayedGather

from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.gather.frames import Gathered, Join, Newer
from mainstay_core.planning.partials import grow
from mainstay_core.rank import machine
from mainstay_core.rank.events import (
    Action,
    Applied,
    Apply,
    CastVote,
    Compute,
    ComputeBroken,
    CorrectEntry,
    DropHeld,
    DropPartials,
    Event,
    Finish,
    Leave,
    LoadFailed,
    LoadState,
    PlanSeen,
    QuorumLost,
    Reduce,
    Reduced,
    RenameCheckpoint,
    ReportsGathered,
    SavesGathered,
    SendFact,
    Settle,
    ShareSaves,
    StateLoaded,
    TodoDone,
    VoidSave,
    VotesGathered,
    WaitForPlan,
    WriteCheckpoint,
)
from mainstay_core.rank.machine import Phase
from mainstay_core.rank.reports import Ballot, last_status, vote_of
from mainstay_core.rank.settle import StateAction
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Member, Partial, Plan
from mainstay_core.wire.votes import Commit, SaveStatus, SettleReport, TypeStat, Vote

CORRUPT = "corrupt"
Table: TypeAlias = tuple[Supply, ...]


@lru_cache(maxsize=100_000)
def bits(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def initial_bits(position: int) -> str:
    return bits("initial", position)


def type_bits(position: int, step: int, shard_type: int, params: str) -> str:
    return bits("type", position, step, shard_type, params)


@lru_cache(maxsize=10_000)
def true_bits(position: int, version: int, num_types: int) -> str:
    """State of a position in a run without failures."""
    params = initial_bits(position)
    for step in range(version):
        gradient = bits(*(type_bits(position, step, t, params) for t in range(num_types)))
        params = bits("applied", params, gradient)
    return params


@dataclass(slots=True)
class Pipe:
    """A chain's pipeline group, one formation of it."""

    cells: int
    attached: set[int] = field(default_factory=set)
    broken: bool = False
    done: dict[int, int] = field(default_factory=dict)
    """By position: types completed in the round it is in."""
    entered: dict[int, object] = field(default_factory=dict)
    """By position: the round it is in."""
    left: dict[int, object] = field(default_factory=dict)
    """By position: the last round that it completed."""


@dataclass(slots=True)
class Trainer:
    """One life of a trainer: the state machine and what its process holds."""

    life: str
    state: machine.RankState
    pending: Action = field(default_factory=WaitForPlan)
    alive: bool = True
    stopped: bool = False
    newest: Plan | None = None
    """As its uplink knows it."""
    adopted: Plan | None = None
    index: int = -1
    posted: bool = False
    line: Line | None = None
    """To the gather of the quorum that it has adopted."""
    pipe: str = ""
    params: str = ""
    partials: dict[Partial, tuple[str, ...]] = field(default_factory=dict)
    reduced: str | None = None
    checked: bool = True
    safe: tuple[int, str] | None = None
    begun: tuple[int, str] | None = None
    """The attempt of which its newest part was begun, written or not."""
    void: tuple[int, str] | None = None
    """An attempt of which its part is never called safe."""
    background: list[Callable[[], None]] = field(default_factory=list)
    """Parts to write and versions to complete, in order."""
    durable: int = 0
    """Newest version that it completed or saw complete."""

    @property
    def quorum(self) -> str:
        assert self.adopted is not None
        return str(self.adopted.quorum)

    @property
    def gather(self) -> Line:
        assert self.line is not None
        return self.line


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a run, and how many faults of each kind it gets."""

    stages: int = 2
    inner: int = 1
    replicas: int = 2
    shards_per_lane: int = 1
    steps: int = 3
    spares: int = 0
    kills: int = 1
    stops: int = 0
    resets: int = 0
    """Connections and rooms that die although everybody lives; whole pipelines too."""
    exclusions: int = 0
    corruptions: int = 0
    checkpoint_every: int = 0

    @property
    def positions(self) -> int:
        return self.stages * self.inner

    @property
    def num_types(self) -> int:
        return self.replicas * self.shards_per_lane


class PlayedTrainers:
    """Everything that happens in one run.

    Args:
        seed: draws everything.
        shape: sizes and faults.
    """

    def __init__(self, seed: int, shape: Shape) -> None:
        self.rng, self.shape = random.Random(seed), shape
        self.trainers: dict[str, Trainer] = {}
        self.gather = PlayedGather()
        self.sums: dict[str, dict[int, tuple[Table, dict[Partial, tuple[str, ...]]]]] = {}
        """By reduction and member: the table, and what the member has given."""
        self.pipes: dict[str, Pipe] = {}
        self.parts: dict[tuple[int, str], dict[int, tuple[str, Commit, str]]] = {}
        self.disk: dict[int, dict[int, tuple[str, Commit, str]]] = {}
        self.commits: dict[int, Commit] = {}
        self.plan: Plan | None = None
        self.went_back = False
        """Whether a stage lost all its copies: what the checkpoint lacks is done again."""
        self.moves = 0
        self.reached: set[tuple[Phase, type]] = set()
        self.happened: set[str] = set()
        self.budget = {
            "kill": shape.kills,
            "stop": shape.stops,
            "reset": shape.resets,
            "exclude": shape.exclusions,
            "corrupt": shape.corruptions,
        }
        names = [f"{'abcd'[r]}{s}" for r in range(shape.replicas) for s in range(shape.positions)]
        for name in [*names, *(f"spare{i}" for i in range(shape.spares))]:
            self._bring_up(f"{name}.1")
        self._publish(
            {
                r: [f"{'abcd'[r]}{s}.1" for s in range(shape.positions)]
                for r in range(shape.replicas)
            }
        )

    # The run ----------------------------------------------------------------

    def run(self, limit: int = 6000) -> None:
        """Run until every member has finished; fails if that takes too long or nobody can move."""
        calm, idle = 150 + self.rng.randrange(150), 0
        while not self._finished():
            self.moves += 1
            assert self.moves < limit, f"no end in sight: {self.describe()}"
            if self.moves < calm:
                self._maybe_fault()
            else:
                self._heal_the_world()
            moved = self._move()
            decided = (self.rng.random() < 0.1 or not moved) and self._decide()
            idle = 0 if moved or decided or self.moves < calm else idle + 1
            assert idle < 50, f"nobody can move: {self.describe()}"
        self._check_end()

    def describe(self) -> str:
        assert self.plan is not None
        lines = [f"{self.plan.quorum} {[m.incarnation for m in self.plan.members]}"]
        lines += [
            f"{t.life} alive={t.alive} {t.state.phase} v{t.state.version} in "
            f"{t.adopted.quorum if t.adopted else None} waits in {t.pending}"
            for t in self.trainers.values()
        ]
        return "\n".join(lines)

    def _finished(self) -> bool:
        """Every position has the last version, and nobody is about to have it by himself."""
        assert self.plan is not None
        done = {self._at(m) for m in self.plan.members if self._has_finished(m)}
        return done == set(range(self.shape.positions)) and all(
            self._has_finished(m)
            or not (trainer := self.trainers[str(m.incarnation)]).alive
            or self._is_parked(trainer)
            or (m.joining and trainer.state.settled < self.plan.quorum.id)
            for m in self.plan.members
        )

    def _at(self, member: Member) -> int:
        return member.rank.stage * self.shape.inner + member.rank.inner

    def _has_finished(self, member: Member) -> bool:
        trainer = self.trainers[str(member.incarnation)]
        return trainer.alive and trainer.state.phase is Phase.FINISHED

    def _check_end(self) -> None:
        assert self.plan is not None
        ends = set()
        for member in filter(self._has_finished, self.plan.members):
            trainer = self.trainers[str(member.incarnation)]
            assert trainer.state.version == self.shape.steps
            assert trainer.params == self._truth(self._at(member), self.shape.steps)
            ends.add((trainer.state.commit_chain, trainer.state.commit))
        assert len(ends) == 1
        assert self.commits[self.shape.steps - 1] in {commit for _, commit in ends}

    def _truth(self, position: int, version: int) -> str:
        return true_bits(position, version, self.shape.num_types)

    def _bring_up(self, life: str) -> None:
        state = machine.RankState(
            slot=slot_of(life),
            incarnation=Incarnation(life),
            num_steps=self.shape.steps,
            shards_per_lane=self.shape.shards_per_lane,
            clip_norm=1.0,
            heal_address=life,
            checkpoint_every_steps=self.shape.checkpoint_every,
            max_attempts=20,
        )
        self.trainers[life] = Trainer(life, machine.saw_durable(state, max(self.disk, default=0)))

    # Faults -----------------------------------------------------------------

    def _maybe_fault(self) -> None:
        if self.rng.random() > 0.03:
            return
        kind = self.rng.choice([k for k, left in self.budget.items() if left] or ["none"])
        able = [t for t in self.trainers.values() if t.alive]
        if kind == "kill":
            self._kill(self.rng.choice(able))
        elif kind == "stop":
            self.rng.choice(able).stopped = True
        elif kind == "reset":
            self._reset()
        elif kind == "exclude":
            assert self.plan is not None
            self._replan(excluded={str(self.rng.choice(self.plan.members).incarnation)})
        if kind not in ("none", "corrupt"):
            self.budget[kind] -= 1
            self.happened.add(kind)

    def _kill(self, trainer: Trainer) -> None:
        trainer.alive = False
        line = trainer.line
        if line is not None and line.is_open:
            line.reset(lost=self.rng.random() < 0.5)
            if self.rng.random() < 0.5:
                self._end_room(line.join.quorum)
        self._end_pipe(trainer)
        if self.rng.random() < 0.5:
            self._restart(trainer.life)

    def _restart(self, life: str) -> None:
        name, _, number = life.partition(".")
        self._bring_up(f"{name}.{int(number) + 1}")

    def _reset(self) -> None:
        """A socket breaks and everybody lives."""
        things: list[Line | Pipe] = [line for line in self.gather.lines if line.is_open]
        things += [p for p in self.pipes.values() if not p.broken]
        thing = self.rng.choice(things) if things else None
        if isinstance(thing, Pipe):
            thing.broken = True
        elif thing is not None:
            thing.reset()
            if self.rng.random() < 0.5:
                self._end_room(thing.join.quorum)

    def _end_room(self, quorum: str) -> None:
        """The pod is gone at which a quorum meets: some get what was under way, others do not."""
        for line in self.gather.lines:
            if line.is_open and line.join.quorum == quorum:
                line.reset(lost=self.rng.random() < 0.5)

    def _maybe_end_while_it_answers(self, quorum: str) -> None:
        """What all have posted reaches some of them only."""
        if self.budget["reset"] and self.rng.random() < 0.05:
            self.budget["reset"] -= 1
            self.happened.add("reset")
            self._end_room(quorum)

    def _heal_the_world(self) -> None:
        """Faults stop: who was stopped goes on, who is dead comes back."""
        newest = {t.life.partition(".")[0]: t for t in self.trainers.values()}
        for trainer in newest.values():
            trainer.stopped = False
            if not trainer.alive:
                self._restart(trainer.life)

    # The coordinator --------------------------------------------------------

    def _members(self) -> list[Trainer]:
        assert self.plan is not None
        return [self.trainers[str(m.incarnation)] for m in self.plan.members]

    def _decide(self) -> bool:
        """Mask, re-form or join, if that is due."""
        assert self.plan is not None
        if any(not t.alive or self._is_parked(t) for t in self._members()):
            return self._replan(excluded=set())
        stopped = {t.life for t in self._members() if t.stopped}
        if stopped and self.rng.random() < 0.3:
            return self._replan(excluded=stopped)
        if all(
            t.state.settled == self.plan.quorum.id and t.adopted == self.plan
            for t in self._members()
        ):
            return self._join()
        return False

    def _is_parked(self, trainer: Trainer) -> bool:
        """What the api makes of repeated reports: whom no plan reaches that he knows."""
        assert self.plan is not None
        if trainer.state.phase is not Phase.PARKED or trainer.adopted is None or trainer.stopped:
            return False
        theirs, ours = trainer.adopted.quorum, self.plan.quorum
        return theirs == ours or self.plan.unplanned_id <= theirs.id < ours.id

    def _spares(self) -> list[str]:
        members = {t.life for t in self._members()}
        return [
            t.life
            for t in self.trainers.values()
            if t.alive and not t.stopped and t.life not in members and t.state.phase is Phase.IDLE
        ]

    def _replan(self, excluded: set[str]) -> bool:
        assert self.plan is not None
        living = {
            str(m.incarnation): self._at(m)
            for m in self.plan.members
            if self.trainers[str(m.incarnation)].alive and str(m.incarnation) not in excluded
        }
        spares, positions = self._spares(), range(self.shape.positions)
        empty = [p for p in positions if p not in living.values()]
        if len(empty) > len(spares):
            return False
        joining = dict(zip(spares, empty, strict=False))
        seated = living | joining
        chains = {
            c.replica: [str(life) for _, life in self.plan.chain_identity(c)]
            for c in self.plan.chains
        }
        chains = {r: lives for r, lives in chains.items() if set(lives) <= set(living)}
        if not chains:
            mates = [next(x for x, at in seated.items() if at == p) for p in positions]
            chains = {self.rng.randrange(self.shape.replicas): mates}
        self._publish(chains, seated, joining=list(joining))
        return True

    def _join(self) -> bool:
        assert self.plan is not None
        missing = [r for r in range(self.shape.replicas) if r not in self._chains()]
        if not missing:
            return False
        chains = self._chains()
        chained = {life for lives in chains.values() for life in lives}
        seated = {str(m.incarnation): self._at(m) for m in self.plan.members}
        spares, joining, mates = self._spares(), [], []
        for position in range(self.shape.positions):
            free = [x for x, at in seated.items() if at == position and x not in chained]
            if not free and spares:
                free = [spares.pop(0)]
                joining.append(free[0])
            if not free:
                return False
            mates.append(free[0])
        seated |= {life: position for position, life in enumerate(mates)}
        self._publish({**chains, missing[0]: mates}, seated, joining=joining, planned=True)
        return True

    def _chains(self) -> dict[int, list[str]]:
        assert self.plan is not None
        return {
            c.replica: [str(life) for _, life in self.plan.chain_identity(c)]
            for c in self.plan.chains
        }

    def _publish(
        self,
        chains: Mapping[int, list[str]],
        seated: Mapping[str, int] | None = None,
        *,
        joining: list[str] | None = None,
        planned: bool = False,
    ) -> None:
        old = self.plan
        number = old.quorum.id + 1 if old else 1
        chained = {life for lives in chains.values() for life in lives}
        formed: dict[int, QuorumId] = {}
        since: dict[str, int] = {}
        if old is not None:
            since = {str(m.incarnation): m.since for m in old.members}
            for chain in old.chains:
                lives = [str(life) for _, life in old.chain_identity(chain)]
                if chains.get(chain.replica) == lives:
                    formed[chain.replica] = chain.formed_in
        plan = make_plan(
            chains,
            followers=[(x, at) for x, at in (seated or {}).items() if x not in chained],
            ranks_per_stage=self.shape.inner,
            lanes=self.shape.replicas,
            shards_per_lane=self.shape.shards_per_lane,
            quorum=number,
            nonce=f"n{self.rng.randrange(10**6)}",
            planned=planned,
            unplanned=old.unplanned_id if planned and old else number,
            since=since,
            joining=joining or [],
            formed=formed,
        )
        self.plan = self._ordered(plan)
        self.happened.add("join" if planned else "mask" if old else "start")
        self.gather.server.hold(number, self.plan)

    def _ordered(self, plan: Plan) -> Plan:
        """The plan with what it orders besides; here nothing."""
        return plan

    # Moves ------------------------------------------------------------------

    def _move(self) -> bool:
        """Let one random trainer that can move do so; or a message or a plan arrive."""
        if self.rng.random() < 0.3 and self._arrive():
            return True
        running = [t for t in self.trainers.values() if t.alive and not t.stopped]
        for trainer in self.rng.sample(running, len(running)):
            if trainer.background and self.rng.random() < 0.2:
                trainer.background.pop(0)()
                return True
            if self._deliver(trainer) or self._advance(trainer):
                return True
        return self._arrive()

    def _arrive(self) -> bool:
        """Let the next message of a random line arrive."""
        lines = [t.line for t in self.trainers.values() if t.alive and not t.stopped and t.line]
        ready = [(line, False) for line in self.gather.lines if line.to_server]
        ready += [(line, True) for line in lines if line.to_member]
        if not ready:
            return False
        line, at_member = self.rng.choice(ready)
        if not at_member:
            answers = self.gather.serve(line)
            if any(isinstance(answer, Gathered) for _, answer in answers):
                self._maybe_end_while_it_answers(line.join.quorum)
        elif isinstance(told := self.gather.hear(line), Newer):
            self._see(self.trainers[line.join.incarnation], told.plan)
        return True

    def _deliver(self, trainer: Trainer) -> bool:
        assert self.plan is not None
        if trainer.newest is self.plan or self.rng.random() < 0.7:
            return False
        self._see(trainer, self.plan)
        return True

    def _see(self, trainer: Trainer, plan: Plan) -> None:
        if trainer.newest is None or trainer.newest.quorum.id < plan.quorum.id:
            trainer.newest = plan
            self._interrupt(trainer)

    def _interrupt(self, trainer: Trainer) -> None:
        if trainer.newest is None:
            return
        ends = machine.interrupts(
            trainer.adopted, trainer.index, trainer.newest, connected=self._is_connected(trainer)
        )
        if ends.quorum and trainer.line is not None:
            trainer.line.leave()
        if ends.pipeline:
            self._end_pipe(trainer)

    def _is_connected(self, trainer: Trainer) -> bool:
        pipe = self.pipes.get(trainer.pipe)
        return pipe is not None and len(pipe.attached) == pipe.cells

    def _end_pipe(self, trainer: Trainer) -> None:
        if trainer.pipe:
            self.pipes[trainer.pipe].broken = True
            trainer.pipe = ""

    def _advance(self, trainer: Trainer) -> bool:
        event = self._wait(trainer)
        if event is None:
            return False
        if event is HALF:
            return True
        assert not isinstance(event, Half)
        if trainer.newest is not None:
            trainer.state = machine.saw_plan(trainer.state, trainer.newest)
        self.reached.add((trainer.state.phase, type(event)))
        transition = machine.step(trainer.state, event)
        trainer.state = transition.state
        for action in transition.actions[:-1]:
            self._perform(trainer, action)
        trainer.pending, trainer.posted = transition.actions[-1], False
        return True

    def _wait(self, trainer: Trainer) -> Event | Half | None:
        handler = _BLOCKING[type(trainer.pending)]
        return handler(self, trainer, trainer.pending)

    def _perform(self, trainer: Trainer, action: Action) -> None:
        match action:
            case Leave():
                if trainer.line is not None:
                    trainer.line.leave()
                self._end_pipe(trainer)
            case DropHeld():
                trainer.partials.clear()
                if trainer.state.mark is None:
                    trainer.reduced = None
            case DropPartials():
                for partial in action.partials:
                    del trainer.partials[partial]
            case WriteCheckpoint():
                assert trainer.adopted is not None
                assert not trainer.background, "a version that is being written is overtaken"
                key = (action.version, trainer.adopted.quorum.nonce)
                part = (trainer.params, action.commit, action.commit_chain)
                position = trainer.state.member_position
                trainer.begun = key
                trainer.background.append(lambda: self._write(trainer, position, key, part))
            case RenameCheckpoint():
                attempt = (action.version, action.nonce)
                trainer.background.append(lambda: self._rename(trainer, attempt))
            case CorrectEntry():
                pass  # no ledger is played here
            case VoidSave():
                if trainer.begun is not None and trainer.begun[0] == action.version:
                    trainer.void = trainer.begun
                if trainer.safe is not None and trainer.safe[0] == action.version:
                    trainer.safe = None
            case SendFact():
                fact = action.fact
                assert fact.kind is not FactKind.FAILED, f"{trainer.life}: {fact.evidence}"
            case Finish():
                pass
            case _:
                raise AssertionError(f"{action} is not the last of its transition")

    def _write(
        self,
        trainer: Trainer,
        position: int,
        key: tuple[int, str],
        part: tuple[str, Commit, str],
    ) -> None:
        self.parts.setdefault(key, {})[position] = part
        if key != trainer.void:
            trainer.safe = key

    def _rename(self, trainer: Trainer, key: tuple[int, str]) -> None:
        version, parts = key[0], self.parts[key]
        assert set(parts) == set(range(self.shape.positions))
        for position, (params, _, _) in parts.items():
            assert params == self._truth(position, version)
        self.disk.setdefault(version, dict(parts))
        trainer.durable = max(trainer.durable, version)
        self.happened.add("checkpoint")

    def _wait_for_plan(self, trainer: Trainer, action: Action) -> Event | None:
        del action
        known = trainer.state.newest.quorum.id if trainer.state.newest else -1
        newer = trainer.newest is not None and trainer.newest.quorum.id > known
        return PlanSeen() if newer else None

    def _settle(self, trainer: Trainer, action: Settle) -> Event | Half | None:
        if not trainer.posted:
            if trainer.line is not None:
                trainer.line.leave()
            trainer.adopted, trainer.index = action.plan, action.report.index
            trainer.durable = max(self.disk, default=0)
            join = Join(
                quorum=trainer.quorum,
                index=trainer.index,
                size=len(action.plan.members),
                incarnation=trainer.life,
            )
            trainer.line = self.gather.enter(join)
            chain = action.plan.chain_of(trainer.index)
            if chain is None or not self._same_chain(trainer, action.plan):
                self._end_pipe(trainer)
            self._interrupt(trainer)
            report = replace(action.report, pipeline=trainer.pipe, durable=trainer.durable)
            return self._post(trainer, "settle", report)
        gathered = self._gathered(trainer, "settle", ReportsGathered)
        if isinstance(gathered, ReportsGathered):
            self._check_settle(action.plan, gathered.reports)
        return gathered

    def _same_chain(self, trainer: Trainer, plan: Plan) -> bool:
        """Whether the pipeline, if there is one, was formed by the same cells."""
        chain = plan.chain_of(trainer.index)
        return chain is not None and trainer.pipe.endswith(_identity(plan, trainer.index))

    def _check_settle(self, plan: Plan, reports: tuple[SettleReport, ...]) -> None:
        """I3: where every position keeps somebody who stayed, nobody of these goes back."""
        stayed = [r for r in reports if r.settled >= plan.members[r.index].since]
        valid = {self._at(plan.members[r.index]) for r in stayed if r.valid}
        outcome = machine.settle(plan, self.shape.shards_per_lane, reports)
        if StateAction.LOAD in outcome.actions and outcome.version <= max(self.commits, default=-1):
            self.went_back = True
        if len(valid) == self.shape.positions and not self.went_back:
            assert outcome.version >= max(r.version for r in stayed), f"I3: {outcome.reason}"
            for report in stayed:
                if report.valid:
                    kept = (StateAction.STAY, StateAction.ROLL)
                    assert outcome.actions[report.index] in kept, outcome.reason
        self.happened |= {str(a) for a in outcome.actions}

    @staticmethod
    def _post(trainer: Trainer, key: str, body: object) -> Half | QuorumLost:
        try:
            trainer.gather.post(key, body)
        except QuorumAborted as end:
            return QuorumLost.of(end)
        trainer.posted = True
        return HALF

    @staticmethod
    def _gathered(
        trainer: Trainer, key: str, make: Callable[[tuple[Any, ...]], Event]
    ) -> Event | None:
        client = trainer.gather.client
        if not client.may_take(key):
            return None
        try:
            return make(client.take(key))
        except QuorumAborted as end:
            return QuorumLost.of(end)

    def _load_state(self, trainer: Trainer, action: LoadState) -> Event | None:
        if action.action is StateAction.LOAD:
            return self._load(trainer, trainer.state.member_position, action.version)
        if trainer.gather.client.ended is not None:
            return QuorumLost.of(trainer.gather.client.ended)
        for life in (self.trainers[self._life(trainer, i)] for i in action.sources):
            if not life.alive or life.adopted is not trainer.adopted:
                continue
            ready = life.state.settled == life.state.plan.quorum.id if life.state.plan else False
            if not ready:
                return None
            assert life.state.version == action.version, "the source went on without its joiner"
            assert not action.expected or action.expected == life.params
            trainer.params = life.params
            return StateLoaded(life.params)
        return LoadFailed("no source is left")

    def _life(self, trainer: Trainer, index: int) -> str:
        assert trainer.adopted is not None
        return str(trainer.adopted.members[index].incarnation)

    def _load(self, trainer: Trainer, position: int, version: int) -> Event:
        if version == 0:
            trainer.params = initial_bits(position)
            return StateLoaded(trainer.params, None, "")
        if version not in self.disk:
            trainer.state = machine.saw_durable(trainer.state, max(self.disk, default=0))
            return LoadFailed("there is no such checkpoint")
        trainer.params, commit, chain = self.disk[version][position]
        return StateLoaded(trainer.params, commit, chain)

    def _compute(self, trainer: Trainer, action: Compute) -> Event | Half | None:
        if not action.types:
            return TodoDone(tuple(sorted(trainer.partials)))
        if self.shape.positions == 1:
            return self._compute_alone(trainer, action)
        assert trainer.adopted is not None
        position, plan = trainer.state.member_position, trainer.adopted
        pipe = self._attach(trainer, position)
        this_round = (str(plan.quorum), trainer.state.version, action.types)
        if not trainer.posted:
            trainer.posted = True
            pipe.entered[position], pipe.done[position] = this_round, 0
            others = {p: r for p, r in pipe.entered.items() if r != this_round}
            clean = all(pipe.left.get(p) == r for p, r in others.items())
            assert clean or pipe.broken, f"traffic of two rounds meets in {trainer.pipe}"
            return HALF
        done = pipe.done.get(position, 0)
        if done == len(action.types):
            pipe.left[position] = this_round
            return TodoDone(tuple(sorted(trainer.partials)))
        able = self._is_able(pipe, position, this_round, done)
        if pipe.broken and not (able and self.rng.random() < 0.5):
            self._end_pipe(trainer)
            return ComputeBroken(tuple(sorted(trainer.partials)), "the chain broke")
        if not able:
            return None
        self._complete(trainer, position, action.types[done])
        pipe.done[position] += 1
        return HALF

    def _is_able(self, pipe: Pipe, position: int, this_round: object, done: int) -> bool:
        """Whether the next type is complete: the last stage needs what all before it sent, the
        others the gradient from the next; inner ranks of a stage need each other's sums."""
        stage, inner = divmod(position, self.shape.inner)
        last = self.shape.stages - 1
        mesh = [stage * self.shape.inner + i for i in range(self.shape.inner) if i != inner]
        if any(pipe.entered.get(p) != this_round or pipe.done[p] < done for p in mesh):
            return False
        if stage == last:
            return all(pipe.entered.get(p) == this_round for p in range(last * self.shape.inner))
        after = position + self.shape.inner
        return pipe.entered.get(after) == this_round and pipe.done[after] > done

    def _attach(self, trainer: Trainer, position: int) -> Pipe:
        """The pipeline that the settle agreed on: a live one, or one named by the quorum."""
        if trainer.posted:
            return self.pipes[trainer.pipe] if trainer.pipe else Pipe(0, broken=True)
        state, plan = trainer.state, trainer.adopted
        assert plan is not None
        assert state.settlement is not None
        chain = plan.chain_of(trainer.index)
        assert chain is not None
        agreed = state.settlement.pipelines[chain.replica]
        name = agreed or f"{plan.quorum}{_identity(plan, trainer.index)}"
        if trainer.newest is not None:
            connected = trainer.pipe == name and self._is_connected(trainer)
            ends = machine.interrupts(plan, trainer.index, trainer.newest, connected=connected)
            if ends.pipeline:
                self._end_pipe(trainer)
                return Pipe(0, broken=True)
        if trainer.pipe != name:
            assert not agreed or trainer.pipe == agreed
            self._end_pipe(trainer)
            pipe = self.pipes.setdefault(name, Pipe(self.shape.positions))
            assert position not in pipe.attached, f"{name} is formed twice: its keys are stale"
            pipe.attached.add(position)
            trainer.pipe = name
            self._interrupt(trainer)
        return self.pipes[name]

    def _compute_alone(self, trainer: Trainer, action: Compute) -> Event | Half:
        held = {t for p in trainer.partials for t in range(p.first, p.last + 1)}
        todo = [t for t in action.types if t not in held]
        if not todo:
            return TodoDone(tuple(sorted(trainer.partials)))
        self._complete(trainer, 0, todo[0])
        return HALF

    def _complete(self, trainer: Trainer, position: int, shard_type: int) -> None:
        grown = grow(trainer.partials, shard_type, self.shape.shards_per_lane)
        value = (type_bits(position, trainer.state.version, shard_type, trainer.params),)
        if grown.first < grown.last:
            run = Partial(lane=grown.lane, first=grown.first, last=shard_type - 1)
            value = trainer.partials.pop(run) + value
        trainer.partials[grown] = value

    def _reduce(self, trainer: Trainer, action: Reduce) -> Event | Half | None:
        assert trainer.adopted is not None
        position = trainer.state.member_position
        key = f"{trainer.quorum}/{position}/{trainer.state.version}/{action.attempt}"
        sums = self.sums.setdefault(key, {})
        if not trainer.posted:
            own = [s.partial for s in action.table if s.index == trainer.index]
            sums[trainer.index] = (action.table, {p: trainer.partials[p] for p in own})
            trainer.posted = True
            return HALF
        members = [m.index for m in trainer.adopted.position_members(position)]
        missing = [i for i in members if i not in sums]
        lost = trainer.gather.client.ended is not None
        lost = lost or any(self._has_left(trainer, i) for i in missing)
        if lost and (missing or self.rng.random() < 0.5):
            trainer.gather.abort("the reduction failed")
            ended = trainer.gather.client.ended
            assert ended is not None
            return QuorumLost.of(ended)
        if missing:
            return None
        rows: dict[Partial, tuple[str, ...]] = {}
        for table, sent in (sums[i] for i in members):
            assert table == action.table, "I2: one table"
            for partial, value in sent.items():
                assert partial not in rows, "I2: sent twice"
                rows[partial] = value
        trainer.reduced = bits(*(v for s in action.table for v in rows[s.partial]))
        trainer.checked = True
        if self.budget["corrupt"] and self.rng.random() < 0.1:
            self.budget["corrupt"] -= 1
            self.happened.add("corrupt")
            trainer.reduced, trainer.checked = CORRUPT, False
        return Reduced()

    def _has_left(self, trainer: Trainer, index: int) -> bool:
        """Whether a member of the trainer's quorum is in its groups no more."""
        other = self.trainers[self._life(trainer, index)]
        in_quorum = other.gather.join.quorum == trainer.quorum
        return not (other.alive and in_quorum and other.gather.client.ended is None)

    def _vote(self, trainer: Trainer, action: CastVote) -> Event | Half | None:
        key = f"vote/{action.step}/{action.attempt}"
        if not trainer.posted:
            return self._post(trainer, key, self._make_vote(trainer, action))
        return self._gathered(trainer, key, VotesGathered)

    def _share_saves(self, trainer: Trainer, action: ShareSaves) -> Event | Half | None:
        key = f"save/{action.round}"
        if not trainer.posted:
            if trainer.background:
                trainer.background.pop(0)()
                return HALF
            return self._post(trainer, key, last_status(_save_status(trainer), action.state))
        return self._gathered(trainer, key, SavesGathered)

    def _make_vote(self, trainer: Trainer, action: CastVote) -> Vote:
        state, stage, inner = trainer.state, trainer.state.member_stage, trainer.state.member_inner
        assert state.step_plan is not None
        assert state.plan is not None
        newest = trainer.newest or state.plan
        own = [
            t
            for s in state.step_plan.table[state.member_position]
            if s.index == trainer.index
            for t in range(s.partial.first, s.partial.last + 1)
        ]
        last = self.shape.stages - 1
        ballot = Ballot(
            norms_sq=(2.0 + stage, 1.0 + inner),
            gradient=bits("gradient", trainer.reduced) if trainer.checked else CORRUPT,
            copies=bits("copies", stage, action.step),
            stats=tuple(
                TypeStat(
                    type=t,
                    loss_sum=t + 0.5 if (stage, inner) == (last, 0) else None,
                    tokens=4 if (stage, inner) == (last, 0) else None,
                    data=bits("data", action.step, t) if (stage, inner) == (0, 0) else None,
                )
                for t in own
            ),
        )
        vote = vote_of(state, action, newest, ballot, _save_status(trainer))
        if trainer.checked:
            return vote
        return replace(vote, ok=False, problem="its own check failed")

    def _apply(self, trainer: Trainer, action: Apply) -> Event:
        step, position = trainer.state.version, trainer.state.member_position
        assert action.commit.step == step
        known = self.commits.setdefault(step, action.commit)
        assert known == action.commit, f"I1: two outcomes of step {step}: {known} {action.commit}"
        assert trainer.reduced is not None, "the mark is gone"
        trainer.params = bits("applied", trainer.params, trainer.reduced)
        assert trainer.params == self._truth(position, step + 1), f"I6: step {step} of {position}"
        return Applied(trainer.params, action.commit)


class Half:
    """A move that ends in no event yet: something was posted or completed."""


HALF = Half()


def _save_status(trainer: Trainer) -> SaveStatus:
    safe = trainer.safe
    return SaveStatus(
        checkpoint_safe=safe[0] if safe else None,
        checkpoint_nonce=safe[1] if safe else "",
        checkpoint_busy=bool(trainer.background),
        durable=trainer.durable,
    )


def _identity(plan: Plan, index: int) -> str:
    chain = plan.chain_of(index)
    assert chain is not None
    return f"/{[life for _, life in plan.chain_identity(chain)]}"


_BLOCKING: dict[type, Callable[..., Event | Half | None]] = {
    WaitForPlan: PlayedTrainers._wait_for_plan,
    Settle: PlayedTrainers._settle,
    LoadState: PlayedTrainers._load_state,
    Compute: PlayedTrainers._compute,
    Reduce: PlayedTrainers._reduce,
    CastVote: PlayedTrainers._vote,
    ShareSaves: PlayedTrainers._share_saves,
    Apply: PlayedTrainers._apply,
}
