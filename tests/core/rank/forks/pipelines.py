"""A pipeline of five stages of which some are lost: its plans, its reports and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.core.plans import make_plan, slot_of

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation
from mainstay_core.rank import machine
from mainstay_core.rank.events import PlanSeen
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import Settlement, StateAction, settle
from mainstay_core.rank.state import RankState
from mainstay_core.reinitialisation.sources import Policy
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import BlockOutline, Fork, ForkOrder, Reinitialisation
from mainstay_core.wire.votes import Commit, SettleReport

STAY, ROLL, HEAL, LOAD, MAKE = (
    StateAction.STAY,
    StateAction.ROLL,
    StateAction.HEAL,
    StateAction.LOAD,
    StateAction.MAKE,
)
RULES = ForkRules(
    outline=tuple((BlockOutline(name=f"layers.{i}", kind="layer"),) for i in range(5))
)


def commit(step: int, *norms_sq: float) -> Commit:
    return Commit(
        step=step, norm=1, scale=1, tokens=1, loss=1, data="0" * 32, norms_sq=norms_sq or (1,) * 5
    )


def order(plan: Plan, *positions: int, lineage: int = 1, since: int = 0) -> Plan:
    return replace(plan, lineage=lineage, fork=ForkOrder(positions=positions, since=since))


def pipeline(quorum: int = 2, *made: int) -> Plan:
    """One replica of five stages: a.1 to e.1; trainers of ``made`` are new, as b.2."""
    lives = [f"{name}.{2 if i in made else 1}" for i, name in enumerate("abcde")]
    stayed = {life: 1 for i, life in enumerate(lives) if i not in made}
    joining = [lives[i] for i in made]
    return make_plan({0: lives}, quorum=quorum, since=stayed, joining=joining, lanes=1)


def reports(
    plan: Plan, version: int = 8, *without: int, **fields: dict[str, Any]
) -> list[SettleReport]:
    """Of members at a version, those of ``without`` having none; fields by life, as ``a``."""
    told = []
    for member in plan.members:
        if member.index in without:
            told.append(SettleReport(index=member.index, valid=False, heal_address="x"))
            continue
        given = {
            "version": version,
            "lineage": plan.lineage,
            "settled": 1,
            "certified_in": "q1-n",
            "commit": commit(version - 1, 1, 1, 3, 1, 1),
            "chain": "before",
            "state": f"state-{member.index}",
            **fields.get(str(member.incarnation)[0], {}),
        }
        told.append(SettleReport(index=member.index, valid=True, **given))
    return told


def settled(plan: Plan, told: Sequence[SettleReport]) -> Settlement:
    return settle(plan, 1, told, fork_rules=RULES)


def made_of(fork: Fork | None) -> list[tuple[int, list[tuple[int, float]]]]:
    assert fork is not None
    return [
        (p.stage, [(s.stage, s.weight) for b in p.blocks for s in b.sources])
        for p in fork.made.positions
    ]


def course(version: int, *stages: int, weights: str = "GradientNorm") -> dict[str, Any]:
    """What a state tells that contains one fork, at that version."""
    plan = order(pipeline(2, *stages), *stages)
    rules = replace(RULES, policy=Policy(weighting=Weighting(weights)))
    forked = settle(plan, 1, reports(plan, version, *stages), fork_rules=rules)
    return {"history": forked.history, "chain": forked.commit_chain}


def rank(life: str, **fields: Any) -> RankState:
    state = RankState(
        slot=slot_of(life),
        incarnation=Incarnation(life),
        num_steps=20,
        shards_per_lane=1,
        clip_norm=None,
        heal_address=life,
        fork_rules=RULES,
    )
    given = {
        "plan": pipeline(fields.get("settled", 1)),
        "valid": True,
        "position": 0,
        "version": 8,
        "settled": 1,
        "digest": "state-0",
        "commit": commit(7, 1, 1, 3, 1, 1),
        "commit_chain": "before",
        **fields,
    }
    return replace(state, **given)


def adopted(state: RankState, plan: Plan) -> RankState:
    return machine.step(machine.saw_plan(state, plan), PlanSeen()).state


def fork(version: int, *blocks: str, steps: int | None = None, inner: int = 0) -> Fork:
    made = [
        {"block": b, "sources": [{"kind": "neighbour", "stage": 0, "block": b}]} for b in blocks
    ]
    told = {"positions": [{"stage": 1, "inner": inner, "blocks": made}], "reason": ""}
    return Fork(
        version=version,
        chain="",
        made=codec.decode(Reinitialisation, told),
        lr_boost=1.1,
        boost_steps=steps,
    )


def forked_at_8() -> Fork:
    """The fork of a run that has lost stage 1 at version 8."""
    plan = order(pipeline(2, 1), 1)
    fork = settled(plan, reports(plan, 8, 1)).fork
    assert fork is not None
    return fork
