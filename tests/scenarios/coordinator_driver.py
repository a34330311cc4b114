"""The coordinator in scenarios: what pods, people and time tell it, and what it decides.

Pods are called ``demo-3`` and their slots ``demo-3/0``; the lives of a slot's
trainer are numbered, so a restarted one is another. The clock stands still but
for ``tick SECONDS`` and ``at SECONDS``. A quorum's nonce is the letter of the
store's history: another one is written after the store has fallen back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.scenarios.plan_text import show_plan
from tests.scenarios.scenario_files import Call, Command, Driver
from tests.worlds.facts import make_fact

from mainstay_core.base import codec
from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    Action,
    AddFaults,
    AddFired,
    Announce,
    DrainRequested,
    EndJob,
    Event,
    FactsReported,
    FaultFired,
    FaultsRequested,
    Inject,
    JobSubmitted,
    PlanReported,
    PodRegistered,
    PublishPlan,
    RecordRecovery,
    ScaleRequested,
    StepsCommitted,
    StopRequested,
    StoreReopened,
    SuspendRequested,
    Tick,
    TopologyReported,
    Transition,
)
from mainstay_core.coordinator.intake.store_recovery import refuse_behind
from mainstay_core.coordinator.invariants import check_invariants
from mainstay_core.coordinator.names import pod_name, slot_name
from mainstay_core.coordinator.scaling import plan_pods
from mainstay_core.coordinator.state import CoordinatorState, all_settled, is_living
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.job.config import JobConfig, SnapshotConfig
from mainstay_core.wire.crashes import Crash
from mainstay_core.wire.facts import Cause, FactKind, Location, PodRegistration
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.recoveries import Recovery

_SHAPE = tuple(JobShape.__dataclass_fields__)
_SETTINGS = (
    "checkpoint_dir",
    "escalate_after",
    "heartbeat_s",
    "heartbeat_timeout_s",
    "hold_back_max_s",
    "hold_back_s",
    "max_restarts",
    "namespace",
    "probe_s",
    "restart_grace_s",
    "spares",
    "startup_deadline_s",
)
_HISTORIES = "abcdefgh"


class CoordinatorDriver(Driver):
    """One job's coordinator, and everybody who tells it things."""

    def __init__(self) -> None:
        self._state: CoordinatorState | None = None
        self._now_s = 0.0
        self._history = 0
        self._lives: dict[Slot, int] = {}
        self._plans: dict[str, Plan] = {}
        self._kept: dict[str, CoordinatorState] = {}

    def commands(self) -> dict[str, Command]:
        return {
            "submit": self._submit,
            "submit-again": self._submit_again,
            "pods-up": self._pods_up,
            "pod-registered": self._pod_registered,
            "trainer-up": self._trainer_up,
            "trainer-died": self._trainer_died,
            "pod-gone": self._pod_gone,
            "parked": self._parked,
            "adopted": self._adopted,
            "settled": self._settled,
            "committed": self._committed,
            "paused": self._paused,
            "finished": self._finished,
            "failed": self._failed,
            "checkpoint": self._checkpoint,
            "leaving": self._leaving,
            "drain": self._drain,
            "scale": self._scale,
            "suspend": lambda call: self._wish(call, suspend=True),
            "resume": lambda call: self._wish(call, suspend=False),
            "stop": self._stop,
            "nodes": self._nodes,
            "ask-fault": self._ask_fault,
            "fault-fires": self._fault_fires,
            "tick": self._tick,
            "store-keeps": self._store_keeps,
            "store-falls-back": self._store_falls_back,
            "store-reopened": self._store_reopened,
            "plan-reported": self._plan_reported,
            "request": self._request,
            "show-plan": self._show_plan,
            "show-pods-wanted": self._show_pods_wanted,
        }

    # The job ------------------------------------------------------------------

    def _submit(self, call: Call) -> list[str]:
        self._pass_time(call)
        self._state = machine.initial(self._config(call), self._now_s)
        return ["the job is known"]

    def _submit_again(self, call: Call) -> list[str]:
        return self._send(call, JobSubmitted(config=self._config(call, self._job.config)))

    def _config(self, call: Call, known: JobConfig | None = None) -> JobConfig:
        """The job as its owner writes it: what is not said is as it was, else the default."""
        shape: dict[str, Any] = {"shards_per_lane": 4, "min_replicas": 1, "steps": 60, "seed": 1}
        shape = {n: getattr(known.shape, n) for n in _SHAPE} if known else shape
        for name in _SHAPE:
            field = name.replace("_", "-")
            if known is None and name in ("lanes", "replicas", "stages") and not call.has(field):
                raise call.error(f"the field {field} is missing")
            if call.has(field):
                shape[name] = call.count(field)
        config = known or JobConfig(
            job=JobUid("uid"),
            name="demo",
            shape=JobShape(**shape),
            entrypoint="model:make",
            workload={},
        )
        settings: dict[str, Any] = {}
        for name in _SETTINGS:
            if not call.has(field := name.replace("_", "-").removesuffix("-s")):
                continue
            default = getattr(config, name)
            number = call.count if isinstance(default, int) else call.number
            settings[name] = call.get(field) if isinstance(default, str) else number(field)
        if call.flag("snapshots") or call.has("snapshot-memory"):
            memory_bytes = call.count("snapshot-memory", 1 << 30)
            settings["snapshots"] = SnapshotConfig(memory_bytes=memory_bytes)
        return replace(config, shape=JobShape(**shape), **settings)

    # Pods and trainers ---------------------------------------------------------

    def _pods_up(self, call: Call) -> list[str]:
        """Pods register, and a trainer comes up on each of their slots."""
        slots, domain = call.count("slots", 1), call.get("domain")
        names = call.words()
        lines = []
        for name in names:
            registered = self._registration(name, slots, domain, "s1")
            lines += self._send(call, PodRegistered(registration=registered), quiet=True)
            for index in range(slots):
                fact = self._up(PodUid(name), index, {"torch": "2"})
                lines += self._send(call, FactsReported(facts=(fact,)), quiet=True)
        num = len(names) * slots
        said = f"{_count(len(names), 'pod')} registered, {_count(num, 'trainer')} up"
        return [said, *lines]

    def _pod_registered(self, call: Call) -> list[str]:
        registration = self._registration(
            call.word(),
            call.count("slots", 1),
            call.get("domain"),
            call.get("supervisor", "s1"),
        )
        return self._send(call, PodRegistered(registration=registration))

    def _registration(self, name: str, slots: int, domain: str, supervisor: str) -> PodRegistration:
        """A pod as its supervisor introduces it; each supervisor has a store of its own."""
        keeps = self._job.config.snapshots is not None
        return PodRegistration(
            pod=PodUid(name),
            name=name,
            address=f"host-of-{name}",
            gather=f"{name}:1",
            num_slots=slots,
            domain=domain,
            pid=1,
            supervisor=supervisor,
            snapshots=f"{name}:{supervisor}" if keeps else "",
        )

    def _trainer_up(self, call: Call) -> list[str]:
        """A new life is up; ``again``: the one that always was there is told of once more."""
        fingerprint = dict(item.split(":", 1) for item in call.names("fingerprint"))
        again = call.flag("again")
        facts = tuple(
            self._up(slot.pod, slot.index, fingerprint or {"torch": "2"}, again=again)
            for slot in map(_slot, call.words())
        )
        return self._send(call, FactsReported(facts=facts))

    def _up(
        self, pod: PodUid, index: int, fingerprint: dict[str, str], *, again: bool = False
    ) -> Any:
        slot = Slot(pod=pod, index=index)
        self._lives[slot] = self._lives.get(slot, 0) + (not again)
        return self._fact(FactKind.TRAINER_UP, slot, fingerprint=fingerprint)

    def _trainer_died(self, call: Call) -> list[str]:
        """Lives end; ``crash`` names the exception that ended them, with its line and step."""
        self._pass_time(call)
        restarting, why = call.flag("restarting"), call.get("why", "killed by signal 9")
        handed_over, life = call.flag("handed-over"), call.count("life")
        crash = None
        if call.has("crash"):
            crash = Crash(
                type=call.need("crash"),
                frames=(call.need("line"),),
                quorum=self._plan.quorum,
                step=call.count("step"),
            )
            why = crash.describe()
        facts = tuple(
            self._fact(
                FactKind.TRAINER_DOWN,
                slot,
                life=life,
                restarting=restarting,
                handed_over=handed_over,
                evidence=why,
                crash=crash,
            )
            for slot in map(_slot, call.words())
        )
        return self._send(call, FactsReported(facts=facts))

    def _pod_gone(self, call: Call) -> list[str]:
        self._pass_time(call)
        why = call.get("why", "its node is no more")
        facts = tuple(
            make_fact(FactKind.POD_GONE, pod=PodUid(name), evidence=why, observed_at_s=self._now_s)
            for name in call.words()
        )
        return self._send(call, FactsReported(facts=facts))

    def _parked(self, call: Call) -> list[str]:
        self._pass_time(call)
        why, quorum = call.get("why", "connection reset"), self._quorum(call)
        suspects = tuple(_slot(name) for name in call.names("suspects"))
        cause = Cause(call.need("cause")) if call.has("cause") else None
        sources = tuple(_slot(name) for name in call.names("sources")) or suspects
        told = call.flag("told")
        facts = tuple(
            self._fact(
                FactKind.PARKED,
                _slot(name),
                quorum=quorum,
                evidence=why,
                suspects=suspects,
                cause=cause,
                sources=sources,
                was_told=told,
            )
            for name in call.words()
        )
        return self._send(call, FactsReported(facts=facts))

    def _adopted(self, call: Call) -> list[str]:
        return self._tell_members(call, FactKind.ADOPTED, reached=call.count("reached", -1))

    def _settled(self, call: Call) -> list[str]:
        """Members hold all settle reports and go on; without names all members do."""
        step, durable = call.count("step", self._job.step), call.count("durable", -1)
        return self._tell_members(call, FactKind.SETTLED, step=step, durable=durable)

    def _paused(self, call: Call) -> list[str]:
        step, durable = call.count("step", self._job.step), call.count("durable", -1)
        return self._tell_members(call, FactKind.PAUSED, step=step, durable=durable)

    def _tell_members(self, call: Call, kind: FactKind, **fields: int) -> list[str]:
        self._pass_time(call)
        quorum = self._quorum(call)
        said = {name: number for name, number in fields.items() if number >= 0}
        slots = [_slot(name) for name in call.words()] or [m.slot for m in self._plan.members]
        facts = [self._fact(kind, slot, quorum=quorum, **said) for slot in slots]
        if len(facts) == 1:
            return self._send(call, FactsReported(facts=tuple(facts)))
        # One after the other, as they come: the last one is the news.
        lines: list[str] = []
        for fact in facts:
            lines += self._send(call, FactsReported(facts=(fact,)), quiet=True)
        what = {FactKind.ADOPTED: "have adopted", FactKind.SETTLED: "go on in"}.get(
            kind, "pause in"
        )
        return [f"{len(facts)} members {what} {quorum}", *lines]

    def _committed(self, call: Call) -> list[str]:
        """The next steps are committed; ``step`` names another one than the next."""
        self._pass_time(call)
        quorum, first = self._quorum(call), call.count("step", self._job.step)
        lines: list[str] = []
        num = call.count("steps", 1)
        for step in range(first, first + num):
            event = StepsCommitted(step=step, quorum=quorum, committed_at_s=self._now_s, step_s=1.0)
            if num == 1:
                return self._send(call, event)
            lines += self._send(call, event, quiet=True)
        return [f"steps {first}..{first + num - 1} are committed in {quorum}", *lines]

    def _finished(self, call: Call) -> list[str]:
        self._pass_time(call)
        slots = [_slot(name) for name in call.words()] or [m.slot for m in self._plan.members]
        masters = call.get("masters", "m")
        lines: list[str] = []
        for slot in slots:
            member = self._member(call, slot)
            final = FinalDigests(
                stage=member.rank.stage,
                inner=member.rank.inner,
                version=self._job.shape.steps,
                params="p",
                masters=masters,
                optimizer="o",
                data="d",
            )
            fact = self._fact(FactKind.FINISHED, slot, quorum=self._plan.quorum, final=final)
            lines += self._send(call, FactsReported(facts=(fact,)), quiet=len(slots) > 1)
        return lines if len(slots) == 1 else [f"{len(slots)} members have finished", *lines]

    def _failed(self, call: Call) -> list[str]:
        slot, why = _slot(call.word()), call.need("why")
        fact = self._fact(FactKind.FAILED, slot, evidence=why)
        return self._send(call, FactsReported(facts=(fact,)))

    def _checkpoint(self, call: Call) -> list[str]:
        slot, why = _slot(call.word()), call.get("problem")
        fact = self._fact(FactKind.CHECKPOINT, slot, durable=call.count("version"), evidence=why)
        return self._send(call, FactsReported(facts=(fact,)))

    def _leaving(self, call: Call) -> list[str]:
        self._pass_time(call)
        why, grace_s = call.get("why", "it is told to end"), call.number("grace")
        facts = tuple(
            make_fact(
                FactKind.LEAVING,
                pod=PodUid(name),
                evidence=why,
                observed_at_s=self._now_s,
                grace_s=grace_s,
            )
            for name in call.words()
        )
        return self._send(call, FactsReported(facts=facts))

    # People, time and the store -------------------------------------------------

    def _drain(self, call: Call) -> list[str]:
        return self._send(call, DrainRequested(pod=call.word(), who=call.get("who", "a user")))

    def _scale(self, call: Call) -> list[str]:
        replicas = call.count("replicas") if call.has("replicas") else None
        spares = call.count("spares") if call.has("spares") else None
        return self._send(call, ScaleRequested(replicas=replicas, spares=spares))

    def _wish(self, call: Call, *, suspend: bool) -> list[str]:
        return self._send(call, SuspendRequested(suspend=suspend))

    def _stop(self, call: Call) -> list[str]:
        return self._send(call, StopRequested(who=call.get("who", "a user")))

    def _nodes(self, call: Call) -> list[str]:
        """Where nodes are: ``nodes n0=rack1/zoneA n1=rack1/zoneA``, near and apart."""
        places = {}
        for name in call.names("names"):
            near, _, apart = call.need(name).partition("/")
            places[name] = Location(near=near, apart=apart)
        return self._send(call, TopologyReported(nodes=places))

    def _ask_fault(self, call: Call) -> list[str]:
        """A fault on a rank (``replica``, ``stage``) or on a spare, in ``step``."""
        on_spare = call.has("spare")
        fault = FaultPoint(
            id=call.word(),
            step=call.count("step"),
            action=FaultAction(call.get("action", "kill-trainer")),
            replica=None if on_spare else call.count("replica"),
            stage=None if on_spare else call.count("stage"),
            spare=call.count("spare") if on_spare else None,
        )
        return self._send(call, FaultsRequested(faults=(fault,)))

    def _fault_fires(self, call: Call) -> list[str]:
        self._pass_time(call)
        fault, slot = call.word(), _slot(call.word())
        event = FaultFired(
            fault=fault,
            pod=slot.pod,
            slot=slot.index,
            rank=str(self._member(call, slot).rank),
            at_s=self._now_s,
        )
        return self._send(call, event)

    def _tick(self, call: Call) -> list[str]:
        """So many seconds pass; ``silent`` says how far pods lag behind the newest heartbeat."""
        self._now_s += float(call.word())
        behind_s = {}
        for item in call.names("silent"):
            pod, _, seconds = item.partition(":")
            behind_s[pod] = float(seconds)
        heard = tuple(PodUid(name) for name in call.names("heard"))
        return self._send(call, Tick(behind_s=behind_s, heard=heard))

    def _store_keeps(self, call: Call) -> list[str]:
        """The store's state as it is now is what a backup or a lagging replica holds."""
        self._kept[call.word()] = self._job
        return ["what the store holds now is kept"]

    def _store_falls_back(self, call: Call) -> list[str]:
        """The store is back with what was kept, or with the job as it was created."""
        name = call.word()
        if name == "empty":
            self._state = machine.initial(self._job.config, self._now_s)
        elif name in self._kept:
            self._state = self._kept[name]
        else:
            raise call.error(f"nothing was kept as {name}")
        self._history += 1
        return ["what was decided since is forgotten"]

    def _store_reopened(self, call: Call) -> list[str]:
        return self._send(call, StoreReopened(server=call.word()))

    def _plan_reported(self, call: Call) -> list[str]:
        pod, quorum = PodUid(call.word()), call.word()
        if quorum not in self._plans:
            raise call.error(f"there was no plan {quorum}; there were {', '.join(self._plans)}")
        event = PlanReported(pod=pod, plan=self._plans[quorum], step=call.count("step"))
        return self._send(call, event)

    def _request(self, call: Call) -> list[str]:
        """Any request of a supervisor, which names the newest plan that it holds."""
        call.word()
        held = self._plans[call.need("holding")].quorum
        try:
            refuse_behind(self._job, held)
        except MainstayError as error:
            return [f"refused ({type(error).__name__}): {error}"]
        return ["accepted"]

    # What is shown ----------------------------------------------------------------

    def _show_plan(self, call: Call) -> list[str]:
        del call
        return show_plan(self._plan)

    def _show_pods_wanted(self, call: Call) -> list[str]:
        del call
        wanted = plan_pods(self._job)
        lines = [f"{wanted.num_pods} pods are wanted"]
        if wanted.leaving:
            lines.append(f"leaving: {', '.join(wanted.leaving)}")
        if wanted.ending:
            lines.append(f"to end now: {', '.join(wanted.ending)}")
        return lines

    def show(self) -> list[str]:
        state = self._job
        line = f"= at {self._now_s:g} s {state.phase}, step {state.step}"
        plan = state.plan
        if plan is not None:
            line += f", {plan.quorum}, {len(plan.chains)} of {state.wanted} replicas"
        notes = [
            *self._notes_of_plan(state),
            *self._notes_of_pods(state),
            *self._notes_of_job(state),
        ]
        return ["; ".join([line, *notes])]

    def _notes_of_plan(self, state: CoordinatorState) -> list[str]:
        plan = state.plan
        if plan is None or state.terminal:
            return []
        notes = []
        if not all_settled(state):
            notes.append(f"{len(state.settled_at_s)} of {len(plan.members)} members settled")
        if plan.pause:
            notes.append(f"{len(state.paused)} of {len(plan.members)} members paused")
        if state.suspicion is not None:
            who = ", ".join(slot_name(state, s) for s in state.suspicion.reporters)
            suspects = ", ".join(slot_name(state, s) for s in state.suspicion.suspects)
            notes.append(f"parked: {who}" + (f", suspecting {suspects}" if suspects else ""))
        if state.waiting is not None:
            notes.append(f"waits until {state.waiting.deadline_s:g} s")
        return notes

    def _notes_of_pods(self, state: CoordinatorState) -> list[str]:
        if state.terminal:
            return []
        gone = [p.registration.name for p in state.pods if p.gone]
        leaving = [p.registration.name for p in state.pods if p.leaving and not p.gone]
        down = [
            slot_name(state, s.slot) + (" (restarting)" if s.restarting else "")
            for s in state.slots
            if s.incarnation is None and s.ended and pod_name(state, s.slot.pod) not in gone
        ]
        used = {m.slot for m in state.plan.members if is_living(state, m)} if state.plan else set()
        free = [
            slot_name(state, s.slot)
            for s in state.slots
            if s.incarnation is not None and s.slot not in used and state.plan is not None
        ]
        held = [
            f"{slot_name(state, s.slot)} until {s.held_until_s:g} s"
            for s in state.slots
            if s.held_until_s > self._now_s
        ]
        held += [
            f"{name} until {domain.held_until_s:g} s"
            for name, domain in state.domains.items()
            if domain.held_until_s > self._now_s
        ]
        refused = [slot_name(state, s.slot) for s in state.slots if s.refused]
        found = {
            "gone": gone,
            "leaving": leaving,
            "down": down,
            "free": free,
            "held back": held,
            "refused": refused,
        }
        return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]

    def _notes_of_job(self, state: CoordinatorState) -> list[str]:
        notes = []
        if state.durable:
            notes.append(f"checkpoint of step {state.durable}")
        if state.checkpoint_problem:
            notes.append(f"checkpoint problem: {state.checkpoint_problem}")
        if state.suspend:
            notes.append("a suspension is wanted")
        if state.unheard:
            notes.append(f"not heard yet: {', '.join(state.unheard)}")
        if state.rivals:
            notes.append(f"rivals: {', '.join(state.rivals)}")
        if state.outcome:
            notes.append(f"outcome: {state.outcome}")
        return notes

    # Helpers ------------------------------------------------------------------------

    @property
    def _job(self) -> CoordinatorState:
        assert self._state is not None, "submit a job first"
        return self._state

    @property
    def _plan(self) -> Plan:
        assert self._job.plan is not None, "there is no plan yet"
        return self._job.plan

    def _pass_time(self, call: Call) -> None:
        if call.at_s is None:
            return
        if call.at_s < self._now_s:
            raise call.error(f"it is {self._now_s:g} s already")
        self._now_s, call.at_s = call.at_s, None

    def _quorum(self, call: Call) -> QuorumId:
        """The quorum that ``in`` names, else the newest."""
        name = call.get("in")
        if not name:
            return self._plan.quorum
        if name not in self._plans:
            raise call.error(f"there was no plan {name}; there were {', '.join(self._plans)}")
        return self._plans[name].quorum

    def _member(self, call: Call, slot: Slot) -> Member:
        found = [m for m in self._plan.members if m.slot == slot]
        if not found:
            raise call.error(f"{slot} is no member of {self._plan.quorum}")
        return found[0]

    def _fact(self, kind: FactKind, slot: Slot, *, life: int = 0, **fields: Any) -> Any:
        """A fact about the newest life of a slot's trainer, or about an earlier one."""
        number = life or self._lives.get(slot, 0)
        return make_fact(
            kind,
            pod=slot.pod,
            slot=slot.index,
            incarnation=Incarnation(f"{slot}.{number}"),
            observed_at_s=self._now_s,
            **fields,
        )

    def _send(self, call: Call, event: Event, *, quiet: bool = False) -> list[str]:
        """Have the coordinator learn an event; ``quiet`` tells of what it does, not of why."""
        self._pass_time(call)
        state = self._job
        nonce = _HISTORIES[self._history]
        try:
            done = machine.step(state, event, self._now_s, nonce)
        except MainstayError as error:
            return [f"refused ({type(error).__name__}): {error}"]
        check_invariants(done.state)
        self._state = codec.loads(CoordinatorState, codec.dumps(done.state))
        assert self._state == done.state, "the store loses something of the state"
        if done.plan is not None:
            self._plans[str(done.plan.quorum)] = done.plan
        return _say(state, done, quiet=quiet)


def _say(before: CoordinatorState, done: Transition, *, quiet: bool) -> list[str]:
    """The reason, and the actions: an announcement's sentence only where it is not the reason."""
    routine = ("PodRegistered", "TrainerUp", "Settled")
    actions = [
        a for a in done.actions if not (quiet and isinstance(a, Announce) and a.code in routine)
    ]
    reason = "" if quiet and not actions else done.reason
    lines = [reason] if reason else []
    if not done.reason and not done.actions and not quiet:
        lines = ["nothing follows"]
    if done.stale:
        lines.append("* the teller gets the newest plan: what it told is of an older quorum")
    for action in actions:
        lines += _say_action(before, action, done.reason)
    return lines


def _say_action(before: CoordinatorState, action: Action, reason: str) -> list[str]:
    match action:
        case PublishPlan(plan=plan):
            first, *rest = show_plan(plan)
            return [f"* publishes {first}", *(f"  {line}" for line in rest)]
        case Announce():
            kind = "warns" if action.warning else "announces"
            said = "" if action.message in reason else f": {action.message}"
            return [f"* {kind} {action.code}{said}"]
        case RecordRecovery(recovery=recovery):
            return [_say_recovery(before, recovery)]
        case EndJob():
            return [f"* tells every pod to end: {action.state}, {action.reason}"]
        case Inject():
            return [f"* has pod {action.pod} carry out {action.fault.id}"]
        case AddFaults():
            return [f"* tells every pod of {', '.join(f.id for f in action.faults)}"]
        case AddFired():
            return [f"* tells every pod that {action.fault} fires"]


def _say_recovery(before: CoordinatorState, recovery: Recovery) -> str:
    known = any(o.recovery.quorum == recovery.quorum for o in before.recoveries)
    if not recovery.done:
        word = "changes" if known else "opens"
        return f"* {word} the recovery of {recovery.quorum} ({recovery.method}): {recovery.fault}"
    times = recovery.times
    five = {
        "detect": times.detect_s,
        "decide": times.decide_s,
        "fence": times.fence_s,
        "load": times.load_s,
        "resume": times.resume_s,
    }
    shown = " ".join(f"{name} {s:g}" for name, s in five.items() if s is not None)
    lost = f", {recovery.lost_steps} steps lost" if recovery.lost_steps else ""
    plan = before.plan
    meant = plan is None or plan.quorum != recovery.quorum or plan.method is recovery.method
    became = "" if meant else f", a {recovery.method} in the end"
    return f"* closes the recovery of {recovery.quorum}: {shown} s{lost}{became}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _slot(name: str) -> Slot:
    pod, _, index = name.partition("/")
    return Slot(pod=PodUid(pod), index=int(index or 0))
