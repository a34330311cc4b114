"""Ranks in scenarios: several real state machines, and what travels between them.

A rank is called by its trainer, a letter for the replica and a number for the
stage: ``a0``, ``a1``, ``b0``. A trainer that comes back is another one: ``a0.2``.
The bits of a state are a word: ``s1v3`` is the state of stage 1 at version 3.
Commands say what happens to ranks; without names it happens to all whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.core.plans import make_plan, slot_of
from tests.scenarios.plan_text import list_runs, show_partials, show_plan
from tests.scenarios.scenario_files import Call, Command, Driver

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, QuorumId
from mainstay_core.planning.partials import grow_all
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
from mainstay_core.rank.machine import Phase, RankState
from mainstay_core.rank.settle import StateAction
from mainstay_core.wire.facts import Parked, RankFact
from mainstay_core.wire.plan import Member, Partial, Plan
from mainstay_core.wire.votes import LastStatus, SaveStatus, SettleReport, TypeStat, Vote


@dataclass(slots=True)
class Trainer:
    """One life of a trainer: its state machine, and what its process would hold."""

    name: str
    state: RankState
    pending: Action = field(default_factory=WaitForPlan)
    newest: Plan | None = None
    """As its supervisor has told it, though its rank may not have looked yet."""
    bits: str = ""
    safe: tuple[int, str] | None = None
    """Its newest part of a checkpoint that is safely written."""
    writing: tuple[int, str] | None = None
    renaming: int = 0
    durable: int = 0
    void: int = 0
    """A version of which its part is never called safe."""
    pipeline: str = ""


class RankDriver(Driver):
    """The ranks of one job."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}
        self._dead: dict[str, Trainer] = {}
        self._plan: Plan | None = None
        self._settings: dict[str, Any] = {}
        self._lanes = 0

    def commands(self) -> dict[str, Command]:
        return {
            "job": self._job,
            "trainers": self._bring_up,
            "died": self._died,
            "plan": self._publish,
            "plan-arrives": self._plan_arrives,
            "settle": self._settle,
            "loaded": self._loaded,
            "load-failed": self._load_failed,
            "computed": self._computed,
            "compute-broken": self._compute_broken,
            "reduced": self._reduced,
            "vote": self._vote,
            "lost": self._quorum_lost,
            "applied": self._applied,
            "written": self._written,
            "write-failed": self._write_failed,
            "renamed": self._renamed,
            "share-saves": self._share_saves,
            "begin": self._begin,
            "steps": self._steps,
        }

    # The job and its plans -------------------------------------------------------

    def _job(self, call: Call) -> list[str]:
        self._lanes = call.count("lanes", 2)
        self._settings = {
            "num_steps": call.count("steps", 8),
            "shards_per_lane": call.count("shards-per-lane", 1),
            "clip_norm": 1.0,
            "checkpoint_every_steps": call.count("checkpoint-every"),
            "max_attempts": call.count("attempts", 3),
        }
        return ["the job is known"]

    def _bring_up(self, call: Call) -> list[str]:
        names, durable = call.words(), call.count("durable")
        for name in names:
            life = name if "." in name else f"{name}.1"
            state = RankState(
                slot=slot_of(life),
                incarnation=Incarnation(life),
                heal_address=life,
                **self._settings,
            )
            state = machine.saw_durable(state, durable)
            self._trainers[name] = Trainer(name, state, durable=durable)
        return [f"{' '.join(names)}: idle, without a state"]

    def _died(self, call: Call) -> list[str]:
        """Trainers are no more. What they had posted in an exchange is there all the same."""
        names = call.words()
        for name in names:
            self._dead[_life(name)] = self._trainers.pop(name)
        return [f"{' '.join(names)}: gone, with all that was held"]

    def _publish(self, call: Call) -> list[str]:
        """A newer plan: ``0=a0,a1 1=b0,b1``, then followers and who joins."""
        old = self._plan
        number = call.count("id", old.quorum.id + 1 if old else 1)
        planned, pause = call.flag("planned"), call.flag("pause")
        joining = [_life(name) for name in call.names("joining")]
        followers = [_life(name) for name in call.names("followers")]
        chains = {
            replica: [_life(name) for name in call.names(str(replica))]
            for replica in range(self._lanes)
            if call.has(str(replica))
        }
        since = {str(m.incarnation): m.since for m in old.members} if old else {}
        formed: dict[int, QuorumId] = {}
        for chain in old.chains if old else ():
            assert old is not None
            lives = [str(life) for _, life in old.chain_identity(chain)]
            if chains.get(chain.replica) == lives:
                formed[chain.replica] = chain.formed_in
        plan = make_plan(
            chains,
            followers=[(life, int(life.partition(".")[0][-1])) for life in followers],
            lanes=self._lanes,
            shards_per_lane=self._settings["shards_per_lane"],
            quorum=number,
            nonce=call.get("nonce", "abcdefgh"[number - 1]),
            planned=planned,
            unplanned=old.unplanned_id if planned and old else number,
            since=since,
            joining=joining,
            formed=formed,
        )
        self._plan = replace(plan, pause=pause)
        return show_plan(self._plan)

    def _plan_arrives(self, call: Call) -> list[str]:
        """The newest plan reaches ranks; who waits for a plan looks at it at once."""
        assert self._plan is not None
        said = []
        for trainer in self._named(call, lambda _: True):
            ends = machine.interrupts(
                trainer.state.plan,
                trainer.state.index,
                self._plan,
                connected=bool(trainer.pipeline),
            )
            trainer.newest = self._plan
            if isinstance(trainer.pending, WaitForPlan):
                said.append((trainer, self._feed(trainer, PlanSeen())))
                continue
            shut = [
                what for what, end in (("quorum", ends.quorum), ("pipeline", ends.pipeline)) if end
            ]
            text = (
                f"its connections of the {' and the '.join(shut)} are shut"
                if shut
                else ("nothing of it is interrupted")
            )
            said.append((trainer, [text]))
        return _group(said)

    # A step, action by action ------------------------------------------------------

    def _settle(self, call: Call) -> list[str]:
        """All members of the newest plan join its gather; who is named gets all reports."""
        plan = self._plan
        assert plan is not None
        members = self._members(call, plan, Settle)
        bad = call.names("bad-state")
        reports = tuple(self._report(t, "?" if t.name in bad else "") for t in members)
        chosen = self._named(call, lambda t: t in members)
        return _group([(t, self._feed(t, ReportsGathered(reports))) for t in chosen])

    def _report(self, trainer: Trainer, damage: str) -> SettleReport:
        assert isinstance(trainer.pending, Settle)
        report = trainer.pending.report
        report = replace(report, state=report.state + damage)
        durable = max(t.durable for t in self._trainers.values())
        return replace(report, pipeline=trainer.pipeline, durable=durable)

    def _loaded(self, call: Call) -> list[str]:
        """Who copies or loads a state has it, with the digest that its version should have."""
        bits = call.get("bits")
        said = []
        for trainer in self._named(call, lambda t: isinstance(t.pending, LoadState)):
            wanted = trainer.pending
            assert isinstance(wanted, LoadState)
            found = bits or f"s{trainer.state.member_stage}v{wanted.version}"
            if wanted.expected and found != wanted.expected:
                raise call.error(f"{found} is not what the reports say: use load-failed")
            trainer.bits = found
            loaded = wanted.action is StateAction.LOAD
            event = StateLoaded(found, None, "") if loaded else StateLoaded(found)
            said.append((trainer, self._feed(trainer, event)))
        return _group(said)

    def _load_failed(self, call: Call) -> list[str]:
        why = call.get("why", "no source is left")
        chosen = self._named(call, lambda t: isinstance(t.pending, LoadState))
        return _group([(t, self._feed(t, LoadFailed(why))) for t in chosen])

    def _computed(self, call: Call) -> list[str]:
        chosen = self._named(call, lambda t: isinstance(t.pending, Compute))
        said = []
        for trainer in chosen:
            assert isinstance(trainer.pending, Compute)
            held = self._held(trainer, trainer.pending.types)
            if trainer.pending.types:
                trainer.pipeline = self._pipeline_of(trainer)
            said.append((trainer, self._feed(trainer, TodoDone(held))))
        return _group(said)

    def _pipeline_of(self, trainer: Trainer) -> str:
        """The group that its chain goes on with: as the settle agreed, or a new one."""
        plan, agreed = trainer.state.plan, trainer.state.agreed_pipeline
        assert plan is not None
        chain = plan.chain_of(trainer.state.index)
        assert chain is not None
        return agreed or trainer.pipeline or f"{chain.formed_in}/{chain.replica}"

    def _compute_broken(self, call: Call) -> list[str]:
        """The chain broke after ``done`` types of the list."""
        done, why = call.count("done"), call.get("why", "the chain broke")
        suspects = self._indices(call)
        said = []
        for trainer in self._named(call, lambda t: isinstance(t.pending, Compute)):
            assert isinstance(trainer.pending, Compute)
            held = self._held(trainer, trainer.pending.types[:done])
            trainer.pipeline = ""
            said.append((trainer, self._feed(trainer, ComputeBroken(held, why, suspects))))
        return _group(said)

    def _held(self, trainer: Trainer, types: Sequence[int]) -> tuple[Partial, ...]:
        return grow_all(trainer.state.held, types, trainer.state.shards_per_lane)

    def _reduced(self, call: Call) -> list[str]:
        chosen = self._named(call, lambda t: isinstance(t.pending, Reduce))
        return _group([(t, self._feed(t, Reduced())) for t in chosen])

    def _vote(self, call: Call) -> list[str]:
        """All members vote; who is named gets all votes. Fields say whose vote is special."""
        wrong = {
            name: call.names(name) for name in ("bad-state", "bad-gradient", "no", "not-a-number")
        }
        problem = call.get("problem", "its own check failed")
        members = self._members(call, self._quorum_of_voters(call), CastVote)
        known = {t.name for t in members}
        for name in (name for names in wrong.values() for name in names):
            if name not in known:
                raise call.error(f"{name} does not vote")
        votes = tuple(
            self._ballot(t, {what for what, names in wrong.items() if t.name in names}, problem)
            for t in members
        )
        chosen = self._named(call, lambda t: t in members)
        return _group([(t, self._feed(t, VotesGathered(votes))) for t in chosen])

    def _quorum_of_voters(self, call: Call) -> Plan:
        voters = [t for t in self._trainers.values() if isinstance(t.pending, CastVote)]
        if not voters or voters[0].state.plan is None:
            raise call.error("nobody votes")
        return voters[0].state.plan

    def _ballot(self, trainer: Trainer, wrong: set[str], problem: str) -> Vote:
        state = trainer.state
        assert isinstance(trainer.pending, CastVote)
        assert state.step_plan is not None
        assert state.plan is not None
        newest = trainer.newest or state.plan
        last = state.plan.num_stages - 1
        own = [
            t
            for s in state.step_plan.table[state.member_position]
            if s.index == state.index
            for t in range(s.partial.first, s.partial.last + 1)
        ]
        step = trainer.pending.step
        return Vote(
            step=step,
            attempt=trainer.pending.attempt,
            ok="no" not in wrong,
            problem=problem if "no" in wrong else "",
            norms_sq=(float("nan") if "not-a-number" in wrong else 4.0,),
            gradient=f"g{step}" + ("?" if "bad-gradient" in wrong else ""),
            state=state.digest + ("?" if "bad-state" in wrong else ""),
            stats=tuple(
                TypeStat(
                    type=t,
                    loss_sum=t + 0.5 if state.member_stage == last else None,
                    tokens=4 if state.member_stage == last else None,
                    data="0" * 32 if state.member_stage == 0 else None,
                )
                for t in own
            ),
            newest_plan=newest.quorum.id,
            newest_nonce=newest.quorum.nonce,
            **_status(trainer),
        )

    def _quorum_lost(self, call: Call) -> list[str]:
        """Who waits for others in a quorum loses it: a member is gone, or the room is."""
        why, suspects = call.get("why", "connection reset"), self._indices(call)
        waits = (Settle, Reduce, CastVote, ShareSaves)
        chosen = self._named(call, lambda t: isinstance(t.pending, waits))
        return _group([(t, self._feed(t, QuorumLost(why, suspects))) for t in chosen])

    def _applied(self, call: Call) -> list[str]:
        said = []
        for trainer in self._named(call, lambda t: isinstance(t.pending, Apply)):
            assert isinstance(trainer.pending, Apply)
            commit, stage = trainer.pending.commit, trainer.state.member_stage
            trainer.bits = f"s{stage}v{trainer.state.version + 1}"
            said.append((trainer, self._feed(trainer, Applied(trainer.bits, commit))))
        return _group(said)

    # Checkpoints --------------------------------------------------------------------

    def _written(self, call: Call) -> list[str]:
        """What ranks write in the background is safely on the disk, unless it was made void."""
        said = []
        for trainer in self._named(call, lambda t: t.writing is not None):
            assert trainer.writing is not None
            if trainer.writing[0] != trainer.void:
                trainer.safe = trainer.writing
            said.append((trainer, [f"its part of version {trainer.writing[0]} is written"]))
            trainer.writing = None
        return _group(said)

    def _write_failed(self, call: Call) -> list[str]:
        """The disk refuses what ranks write: they write no more, and no part is safe."""
        said = []
        for trainer in self._named(call, lambda t: t.writing is not None):
            assert trainer.writing is not None
            said.append((trainer, [f"its part of version {trainer.writing[0]} cannot be written"]))
            trainer.writing = None
        return _group(said)

    def _renamed(self, call: Call) -> list[str]:
        """Who renames a version has done it: the version is durable."""
        said = []
        for trainer in self._named(call, lambda t: bool(t.renaming)):
            trainer.durable, trainer.renaming = trainer.renaming, 0
            said.append((trainer, [f"version {trainer.durable} is durable"]))
        return _group(said)

    def _share_saves(self, call: Call) -> list[str]:
        bad = call.names("bad-state")
        plan = next(t.state.plan for t in self._trainers.values() if _is(t, ShareSaves))
        assert plan is not None
        members = self._members(call, plan, ShareSaves)
        statuses = tuple(
            LastStatus(**_status(t), state=t.state.digest + ("?" if t.name in bad else ""))
            for t in members
        )
        chosen = self._named(call, lambda t: t in members)
        return _group([(t, self._feed(t, SavesGathered(statuses))) for t in chosen])

    def _begin(self, call: Call) -> list[str]:
        """A new job loads its initial state and takes so many steps, told in one line."""
        for play in (self._plan_arrives, self._settle, self._loaded):
            play(Call("begin", call.line))
        self._take(call, call.count("steps"))
        return self._say_step()

    def _steps(self, call: Call) -> list[str]:
        """So many steps without a fault, told in one line."""
        self._take(call, int(call.word()))
        return self._say_step()

    def _take(self, call: Call, num: int) -> None:
        for _ in range(num):
            for play in (self._computed, self._reduced, self._vote, self._applied):
                play(Call("step", call.line))

    def _say_step(self) -> list[str]:
        said = []
        for trainer in self._trainers.values():
            state = trainer.state
            where = f"step {state.version} in {state.plan.quorum}" if state.plan else "no plan"
            said.append((trainer, [f"{state.phase}, {where}"]))
        return _group(said)

    # Helpers ----------------------------------------------------------------------------

    def _members(self, call: Call, plan: Plan, kind: type[Action]) -> list[Trainer]:
        """The plan's members in index order, each of which must be at the same exchange."""
        by_life = self._dead | {str(t.state.incarnation): t for t in self._trainers.values()}
        found = []
        for member in plan.members:
            trainer = by_life.get(str(member.incarnation))
            there = trainer is not None and isinstance(trainer.pending, kind)
            if trainer is None or not there or trainer.state.plan != plan:
                raise call.error(f"{member.incarnation} is not there: the exchange cannot complete")
            found.append(trainer)
        return found

    def _named(self, call: Call, turn: Callable[[Trainer], bool]) -> list[Trainer]:
        """The trainers that the command names, whose turn it must be; else all whose it is."""
        names = call.words()
        for name in names:
            if name not in self._trainers:
                raise call.error(f"there is no trainer {name}")
            if not turn(self._trainers[name]):
                raise call.error(f"it is not {name}'s turn: {self._trainers[name].pending}")
        chosen = [self._trainers[name] for name in names]
        chosen = chosen or [t for t in self._trainers.values() if turn(t)]
        if not chosen:
            raise call.error("it is nobody's turn")
        return chosen

    def _indices(self, call: Call) -> tuple[int, ...]:
        """Members of the newest adopted plan that ``suspects`` names."""
        names = [_life(name) for name in call.names("suspects")]
        assert self._plan is not None
        return tuple(m.index for m in self._plan.members if str(m.incarnation) in names)

    def _feed(self, trainer: Trainer, event: Event) -> list[str]:
        """Have a rank learn an event, its newest plan first, and carry out what follows."""
        if trainer.newest is not None:
            trainer.state = machine.saw_plan(trainer.state, trainer.newest)
        try:
            done = machine.step(trainer.state, event)
        except MainstayError as error:
            return [f"refused ({type(error).__name__}): {error}"]
        trainer.state = done.state
        for action in done.actions:
            self._perform(trainer, action)
        trainer.pending = done.actions[-1]
        said = [_say(trainer, a) for a in done.actions if not isinstance(a, WaitForPlan)]
        return [done.reason, *(f"* {text}" for text in said), _show(trainer)]

    def _perform(self, trainer: Trainer, action: Action) -> None:
        plan = trainer.state.plan
        match action:
            case Leave():
                trainer.pipeline = ""
            case WriteCheckpoint():
                assert plan is not None
                trainer.writing = (action.version, plan.quorum.nonce)
            case RenameCheckpoint():
                trainer.renaming = action.version
            case VoidSave():
                trainer.void = action.version
                if trainer.safe is not None and trainer.safe[0] == action.version:
                    trainer.safe = None


def _is(trainer: Trainer, kind: type[Action]) -> bool:
    return isinstance(trainer.pending, kind)


def _status(trainer: Trainer) -> dict[str, Any]:
    safe = trainer.safe
    status = SaveStatus(
        checkpoint_safe=safe[0] if safe else None,
        checkpoint_nonce=safe[1] if safe else "",
        checkpoint_busy=trainer.writing is not None or bool(trainer.renaming),
        durable=trainer.durable,
    )
    return {name: getattr(status, name) for name in SaveStatus.__dataclass_fields__}


def _life(name: str) -> str:
    return name if "." in name else f"{name}.1"


def _replica(member: Member) -> str:
    """The letter of a member's trainer, and its life if it is not the first."""
    name, _, life = str(member.incarnation).partition(".")
    return name[0] + ("" if life == "1" else f".{life}")


def _group(said: Iterable[tuple[Trainer, list[str]]]) -> list[str]:
    """One paragraph for all ranks that say the same."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for trainer, lines in said:
        groups.setdefault(tuple(lines), []).append(trainer.name)
    shown = []
    for (first, *rest), names in groups.items():
        shown += [f"{' '.join(names)}: {first}", *(f"  {line}" for line in rest)]
    return shown


def _say(trainer: Trainer, action: Action) -> str:
    match action:
        case Leave():
            return "drops all its connections of the quorum"
        case Settle(plan=plan, report=report):
            return f"joins the gather of {plan.quorum}, reports {_say_report(report)}"
        case SendFact(fact=fact):
            return f"tells {_say_fact(fact)}"
        case DropHeld():
            return "frees what it holds"
        case DropPartials(partials=partials):
            types = (t for p in partials for t in range(p.first, p.last + 1))
            return f"frees types {list_runs(types)}"
        case LoadState():
            return _say_load(trainer, action)
        case Compute(types=types):
            return f"computes types {list_runs(types)}" if types else "computes nothing"
        case Reduce(table=table, attempt=attempt):
            assert trainer.state.plan is not None
            names = [_replica(trainer.state.plan.members[s.index]) for s in table]
            rows = [
                f"{show_partials([s.partial])} of {n}" for s, n in zip(table, names, strict=True)
            ]
            return f"adds {', '.join(rows)}" + (f", attempt {attempt}" if attempt else "")
        case CastVote(step=step):
            return f"votes on step {step}"
        case Apply(commit=commit):
            return f"applies step {commit.step}"
        case WriteCheckpoint(version=version):
            return f"writes its part of version {version} in the background"
        case RenameCheckpoint(version=version, nonce=nonce):
            return f"makes version {version} complete (parts of {nonce})"
        case CorrectEntry(step=step):
            return f"tells its entry of step {step}, in place of one with a bad state"
        case VoidSave(version=version):
            return f"never calls its part of version {version} safe"
        case ShareSaves(round=number):
            return f"tells the others how its checkpoint is, round {number}"
        case Finish():
            return "tells the final digests"
        case WaitForPlan():
            return "waits for a plan"


def _say_report(report: SettleReport) -> str:
    if not report.valid:
        return "no valid state"
    said = f"version {report.version}, holding {show_partials(report.held)}"
    return said + (f", the mark of {report.mark}" if report.mark else "")


def _say_fact(fact: RankFact) -> str:
    said = f"{fact.kind} at step {fact.step}"
    if isinstance(fact, Parked) and fact.suspects:
        said += f", suspecting {' '.join(str(s) for s in fact.suspects)}"
    if isinstance(fact, Parked) and fact.differing:
        said += f", naming {' '.join(str(s) for s in fact.differing)} as wrong"
    return said + (f": {fact.evidence}" if fact.evidence else "")


def _say_load(trainer: Trainer, load: LoadState) -> str:
    if load.action is StateAction.LOAD:
        return f"loads version {load.version}"
    assert trainer.state.plan is not None
    members = trainer.state.plan.members
    sources = " or ".join(str(members[i].slot.pod) for i in load.sources)
    expected = f", which must be {load.expected}" if load.expected else ""
    return f"copies version {load.version} from {sources}{expected}"


def _show(trainer: Trainer) -> str:
    state = trainer.state
    line = f"= {state.phase}, version {state.version}" if state.valid else f"= {state.phase}, void"
    if state.held:
        line += f", holds {show_partials(state.held)}"
    if state.mark and state.phase is not Phase.FINISHED:
        line += f", mark of {state.mark}"
    return line
