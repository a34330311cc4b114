"""The pods of a job, played at its coordinator: what they tell it, and what came of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tests.worlds.facts import make_fact

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, Slot
from mainstay_core.base.shape import JobShape
from mainstay_core.coordinator import machine
from mainstay_core.coordinator.events import (
    Action,
    Announce,
    EndJob,
    Event,
    FactsReported,
    PlanReported,
    PodRegistered,
    PublishPlan,
    RecordRecovery,
    StepsCommitted,
    Tick,
    Transition,
)
from mainstay_core.coordinator.invariants import check_invariants
from mainstay_core.coordinator.state import CoordinatorState, is_leaving, is_living
from mainstay_core.job.config import JobConfig
from mainstay_core.wire.facts import Fact, FactKind, PodRegistration
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Member, Plan
from mainstay_core.wire.reinitialisation import ToldHistory


class PlayedPods:
    """A job's coordinator and everybody who tells it things. Checks invariants after each step."""

    def __init__(self, config: JobConfig) -> None:
        self.state = machine.initial(config, 0.0)
        self.now_s = 0.0
        self.actions: list[Action] = []
        self.last: Transition = Transition(state=self.state)
        self.nonces: set[str] = set()
        self._lives = itertools.count()

    def send(self, event: Event, after_s: float = 0.01) -> Transition:
        self.now_s += after_s
        before = self.state
        nonce = f"n{len(self.nonces)}"
        self.nonces.add(nonce)
        try:
            self.last = machine.step(self.state, event, self.now_s, nonce)
        except Exception:
            assert self.state == before
            raise
        self.state = self.last.state
        check_invariants(self.state)
        assert len([a for a in self.last.actions if isinstance(a, PublishPlan)]) <= 1
        if self.last.plan and not isinstance(event, PlanReported):
            self._check_plan(before, self.last.plan)
        self.actions += self.last.actions
        return self.last

    def _check_plan(self, before: CoordinatorState, plan: Plan) -> None:
        old = before.plan
        assert plan.quorum.id == before.last_id + 1
        gone = {p.registration.pod for p in self.state.pods if p.gone}
        assert plan.rendezvous.pod not in gone
        assert all(is_living(self.state, m) for m in plan.members), "a dead member"
        causes = {m.slot: m.incarnation for m in (old.members if old else ())}
        for member in plan.members:
            fresh = causes.get(member.slot) != member.incarnation
            assert not (fresh and is_leaving(before, member.slot.pod)), "a leaving pod is seated"
        if old is None:
            return
        if plan.planned:
            kept = {m.incarnation for m in plan.members}
            outgoing = [m for m in old.members if m.incarnation not in kept]
            if len(plan.chains) < self.state.wanted:
                assert all(is_leaving(self.state, m.slot.pod) for m in outgoing), (
                    "a member is dropped that nobody wants to leave"
                )
            assert len(plan.chains) <= max(len(old.chains), self.state.wanted)
        known = {(m.slot, m.incarnation): m for m in old.members}
        for member in plan.members:
            stayed = known.get((member.slot, member.incarnation))
            here = stayed is not None and stayed.rank.position == member.rank.position
            expected = stayed.since if stayed and here else plan.quorum.id
            assert member.since == expected, "since is not when the membership began"
        for chain in plan.chains:
            twin = next(
                (c for c in old.chains if old.chain_identity(c) == plan.chain_identity(chain)),
                None,
            )
            expected_quorum = twin.formed_in if twin else plan.quorum
            assert chain.formed_in == expected_quorum, "an untouched chain keeps its group"
            assert twin is None or twin.replica == chain.replica

    # What people and pods do --------------------------------------------------

    @property
    def plan(self) -> Plan:
        assert self.state.plan is not None
        return self.state.plan

    def register(self, name: str, num_slots: int = 1, **fields: Any) -> Transition:
        if self.state.config.snapshots is not None:
            fields.setdefault("snapshots", f"{name}:2")
        registration = PodRegistration(
            pod=PodUid(name),
            name=name,
            address=f"host-of-{name}",
            gather=f"{name}:1",
            num_slots=num_slots,
            pid=fields.pop("pid", 1),
            **fields,
        )
        return self.send(PodRegistered(registration=registration))

    def up(self, name: str, slot: int = 0, **fields: Any) -> Incarnation:
        life = Incarnation(fields.pop("life", None) or f"life{next(self._lives)}")
        fields.setdefault("fingerprint", {"torch": "2"})
        self.tell(self.fact(FactKind.TRAINER_UP, name, slot, incarnation=life, **fields))
        return life

    def fact(self, kind: FactKind, pod: str, slot: int | None = 0, **fields: Any) -> Fact:
        fields.setdefault("observed_at_s", self.now_s)
        return make_fact(kind, pod=PodUid(pod), slot=slot, **fields)

    def tell(self, *facts: Fact, after_s: float = 0.01) -> Transition:
        return self.send(FactsReported(facts=facts), after_s)

    def down(self, member: Member, *, restarting: bool = False) -> Transition:
        return self.tell(self.down_fact(member, restarting=restarting))

    def down_fact(self, member: Member, *, restarting: bool = False) -> Fact:
        return self.fact(
            FactKind.TRAINER_DOWN,
            member.slot.pod,
            member.slot.index,
            incarnation=member.incarnation,
            restarting=restarting,
            evidence="killed by signal 9",
        )

    def pod_gone(self, *names: str) -> Transition:
        return self.tell(*(self.fact(FactKind.POD_GONE, n, None, evidence="killed") for n in names))

    def about(self, kind: FactKind, member: Member, **fields: Any) -> Fact:
        if kind not in (FactKind.TRAINER_UP, FactKind.TRAINER_DOWN):
            fields.setdefault("quorum", self.plan.quorum)
        return self.fact(
            kind,
            member.slot.pod,
            member.slot.index,
            incarnation=member.incarnation,
            **fields,
        )

    def park(self, member: Member, *suspects: Slot, quorum: QuorumId | None = None) -> Transition:
        fields: dict[str, Any] = {"suspects": suspects, "evidence": "connection reset"}
        if quorum:
            fields["quorum"] = quorum
        return self.tell(self.about(FactKind.PARKED, member, **fields))

    def settle(self, step: int | None = None, history: ToldHistory | None = None) -> None:
        """Every member of the current plan adopts it and goes on; the first tells a history."""
        at = self.state.step if step is None else step
        quorum = self.plan.quorum
        for kind in (FactKind.ADOPTED, FactKind.SETTLED):
            for member in self.plan.members:
                first = kind is FactKind.SETTLED and member.index == 0
                told = {"history": history} if first and history is not None else {}
                if self.plan.quorum == quorum:
                    self.tell(self.about(kind, member, step=at, **told))

    def commit(self, step: int | None = None, quorum: QuorumId | None = None) -> Transition:
        return self.send(
            StepsCommitted(
                step=self.state.step if step is None else step,
                quorum=quorum or self.plan.quorum,
                committed_at_s=self.now_s,
                step_s=0.01,
            )
        )

    def finish(self, member: Member, **fields: Any) -> Transition:
        final = FinalDigests(
            stage=member.rank.stage,
            inner=member.rank.inner,
            version=self.state.shape.steps,
            params="p",
            masters="m",
            optimizer="o",
            data="d",
        )
        final = replace(final, **fields)
        return self.tell(self.about(FactKind.FINISHED, member, final=final))

    def tick(self, after_s: float = 0.1, **behind_s: float) -> Transition:
        return self.send(Tick(behind_s=behind_s), after_s)

    # What came of it ----------------------------------------------------------

    def member(self, replica: int | None, stage: int, inner: int = 0) -> Member:
        place = (replica, (stage, inner))
        return next(m for m in self.plan.members if (m.rank.replica, m.rank.position) == place)

    def followers(self) -> list[Member]:
        return [m for m in self.plan.members if m.rank.replica is None]

    def announced(self) -> list[str]:
        return [a.code for a in self.actions if isinstance(a, Announce)]

    def messages(self) -> str:
        return "\n".join(a.message for a in self.actions if isinstance(a, Announce))

    def recoveries(self) -> dict[int, Any]:
        recorded = [a.recovery for a in self.actions if isinstance(a, RecordRecovery)]
        return {r.quorum.id: r for r in recorded}

    def ended(self) -> EndJob | None:
        return next((a for a in self.actions if isinstance(a, EndJob)), None)

    def stored(self) -> None:
        """Pass the state through the store's encoding."""
        again = codec.loads(CoordinatorState, codec.dumps(self.state))
        assert again == self.state
        self.state = again


def make_config(**fields: Any) -> JobConfig:
    shape: dict[str, Any] = {
        "lanes": 4,
        "shards_per_lane": 4,
        "replicas": 4,
        "min_replicas": 1,
        "stages": 2,
        "steps": 60,
        "seed": 1,
    }
    names = set(JobShape.__dataclass_fields__)
    shape |= {name: fields.pop(name) for name in list(fields) if name in names}
    if "lanes" in shape and shape["replicas"] > shape["lanes"]:
        shape["replicas"] = shape["lanes"]
    return JobConfig(
        job=JobUid("uid"),
        name="demo",
        shape=JobShape(**shape),
        entrypoint="a:b",
        workload={},
        **fields,
    )
