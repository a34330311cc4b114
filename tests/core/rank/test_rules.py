"""The rules by which trainers decide have a number, which changes when a decision does.

The decisions here are drawn from a seed. If their digest is another one, trainers of this release
decide otherwise than those of the release before: raise ``mainstay_core.wire.rules.NUMBER``, then
write down the new digest. Fields that are merely added to what is decided do not enter it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.core.plans import make_plan, slot_of
from tests.core.rank.test_machine import report, vote

from mainstay_core.base.codec import dumps
from mainstay_core.base.errors import LocalProtocolError
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.witness import Account, Exchanged, Told, rule
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.rank.replays.told_records import choose_records
from mainstay_core.rank.settle import Settlement, settle
from mainstay_core.rank.steps.doubts import Doubt, compared_of
from mainstay_core.rank.steps.step_plan import Compared, StepPlan, plan_step
from mainstay_core.rank.steps.witness import compared_in
from mainstay_core.rank.votes import judge
from mainstay_core.wire import rules
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.segments import Run, StoreReport, UnitHeld
from mainstay_core.wire.votes import Commit, CommitRecord, seal_record

DECISIONS = {7: "49b090fc24e3a575ad5170789c2f99bd"}
"""Digest of the decisions below, by the number of the rules. What forks come to is not drawn
here."""
SHARDS = 2
NAMES = "abcdefgh"


def draw_plan(rng: random.Random) -> Plan:
    """Whole chains; in a part of the plans a stage has several ranks."""
    stages, lanes, width = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2))
    places = range(stages * width)
    chains = {lane: [f"{NAMES[lane]}{place}.1" for place in places] for lane in range(lanes)}
    return make_plan(chains, ranks_per_stage=width, shards_per_lane=SHARDS)


def shown_step(step: StepPlan) -> Any:
    table = [
        [(s.partial.lane, s.partial.first, s.partial.last, s.index) for s in position]
        for position in step.table
    ]
    return [sorted(step.todo.items()), table, sorted(step.kept.items())]


def shown_settle(outcome: Settlement) -> Any:
    return [
        outcome.version,
        [action.value for action in outcome.actions],
        outcome.sources,
        outcome.expected,
        outcome.certified_in,
        outcome.refused_in,
        sorted(outcome.pipelines.items()),
        outcome.stage_groups,
        shown_step(outcome.step),
    ]


def draw_held(rng: random.Random, plan: Plan) -> tuple[Partial, ...]:
    lanes = len(plan.suppliers) // SHARDS
    return tuple(
        Partial(lane=lane, first=SHARDS * lane, last=SHARDS * lane + rng.randint(0, SHARDS - 1))
        for lane in range(lanes)
        if rng.random() < 0.5
    )


def settles(rng: random.Random) -> Iterator[Any]:
    plan = draw_plan(rng)
    reports = []
    for member in plan.members:
        version = rng.choice((3, 4, 4, 4))
        marks = {"mark": str(plan.quorum)} if rng.random() < 0.3 else {}
        told = report(
            member.index,
            valid=rng.random() < 0.85,
            version=version,
            durable=rng.choice((0, 2)),
            certified_in=str(plan.quorum) if rng.random() < 0.8 else None,
            settled=rng.choice((plan.quorum.id, -1)),
            held=draw_held(rng, plan),
            held_in=rng.choice((1, 2)),
            refused_in=rng.choice((-1, -1, 1)),
            state=rng.choice("xxy"),
            pipeline=rng.choice(("p", "p", "")),
            stage_group=rng.choice(("g", "g", "")),
            **marks,
        )
        reports.append(told)
    try:
        yield shown_settle(settle(plan, SHARDS, reports))
    except LocalProtocolError as error:
        yield str(type(error))


def steps(rng: random.Random) -> Iterator[Any]:
    plan = draw_plan(rng)
    held = {m.index: draw_held(rng, plan) for m in plan.members if rng.random() < 0.5}
    bad = [t for t in range(len(plan.suppliers)) if rng.random() < 0.2]
    compared = None
    if len(plan.chains) > 1 and rng.random() < 0.5:
        pair = rng.sample([c.replica for c in plan.chains], 2)
        compared = Compared(type=SHARDS * rng.randrange(len(plan.chains)), replicas=tuple(pair))
    healing = [m.index for m in plan.members if rng.random() < 0.1]
    yield shown_step(plan_step(plan, SHARDS, held, healing, bad=bad, compared=compared))
    witnessed = compared_in(plan, rng.randrange(100), rng.choice((1, 3)), SHARDS)
    yield None if witnessed is None else [witnessed.type, witnessed.replicas]


def votes(rng: random.Random) -> Iterator[Any]:
    plan = draw_plan(rng)
    cast = [
        vote(
            ok=rng.random() < 0.95,
            gradient=rng.choice("gggh"),
            state=rng.choice("sssst"),
            bad=(rng.randrange(len(plan.suppliers)),) if rng.random() < 0.1 else (),
            newest_plan=rng.choice((1, 1, 9)),
        )
        for _ in plan.members
    ]
    verdict = judge(plan, cast, rng.choice((None, 1.0)), "")
    commit = verdict.commit
    yield [
        None if commit is None else [commit.norm, commit.scale, commit.tokens, commit.data],
        verdict.state_bad,
        verdict.hopeless,
        verdict.adopt_planned,
        verdict.bad,
        verdict.bad_chains,
        verdict.undecided,
    ]


def draw_account(rng: random.Random, plan: Plan, made: str) -> Account:
    """What one cell tells of a type; now and then something that the others do not."""
    wrong = rng.choice(("", "", "", "", "forward", "backward", "weights", "given", "partial"))
    in_pass = rng.choice((Pass.FORWARD, Pass.BACKWARD)) if wrong == "partial" else Pass.FORWARD
    exchanged = Exchanged(
        in_pass=in_pass,
        micro_batch=0,
        given=("h" if wrong == "given" else "g",),
        made=("o" if rng.random() < 0.05 else made,),
    )
    return Account(
        forward=("g" if wrong == "forward" else "f",),
        backward=("c" if wrong == "backward" else "b",),
        weights=("v" if wrong == "weights" else "w",),
        exchanged=(exchanged,) if plan.ranks_per_stage > 1 else (),
        is_partial=wrong == "partial" and rng.random() < 0.5,
    )


def witnesses(rng: random.Random) -> Iterator[Any]:
    plan = draw_plan(rng)
    told = []
    for attempt in range(rng.randint(1, 3)):
        for chain in plan.chains:
            cells = tuple(slot_of(plan.members[i].incarnation) for i in chain.cells)
            made = rng.choice("mmmmn")  # what all ranks of a cell have added up
            accounts = tuple(draw_account(rng, plan, made) for _ in cells)
            one = Told(
                quorum=1, attempt=attempt, replica=chain.replica, cells=cells, telling=accounts
            )
            told.append(one)
    ruling = rule(told, plan.ranks_per_stage)
    agreed = next((i for i, one in enumerate(told) if one.telling == ruling.agreed), None)
    yield [
        agreed,
        [
            (
                str(d.slot),
                d.verdict.value,
                (d.difference.position, d.difference.exchange, d.difference.came_out),
                [str(slot) for slot in d.beside],
            )
            for d in ruling.deviations
        ],
        [str(slot) for slot in ruling.doubted],
        compared_of(plan, Doubt(type=0, told=tuple(told))).replicas,
    ]


def records(rng: random.Random) -> Iterator[Any]:
    """What stores tell of commits: now and then another one, or damaged, or of another quorum."""
    reports = []
    for name in rng.sample(NAMES, rng.randint(1, 6)):
        told = tuple(draw_record(rng, step) for step in range(3) if rng.random() < 0.9)
        reports.append(StoreReport(pod=PodUid(name), address=f"{name}:1", lineage=1, records=told))
    chosen = choose_records(reports, 1)
    yield [
        [(step, dumps(record)) for step, record in sorted(chosen.chosen.items())],
        [(step, sorted(quorums)) for step, quorums in sorted(chosen.certified.items())],
        chosen.damaged,
        chosen.outvoted,
        chosen.disputed,
    ]


def units(rng: random.Random) -> Iterator[Any]:
    """What stores tell of a position's units, now and then with wrong numbers: what it reaches."""
    known = tuple(draw_record(random.Random(1), step) for step in range(40))
    known = tuple(r for r in known if r.states and r.lineage == 1)[:4]
    first, last = known[0].commit.step, known[-1].commit.step
    reports = [
        StoreReport(
            pod=PodUid(name),
            address=f"{name}:1",
            lineage=1,
            records=known,
            units=tuple(
                UnitHeld(
                    position=0,
                    unit=rng.choice((unit,) * 19 + (unit + 4,)),
                    unit_name=f"u{unit}",
                    num_units=rng.choice((2,) * 9 + (1, 3)),
                    states=(first,),
                    gradients=(Run(first=first, last=last),),
                )
                for unit in range(2)
                if rng.random() < 0.8
            ),
        )
        for name in rng.sample(NAMES, rng.randint(1, 3))
    ]
    stores = Stores(reports, 1)
    replay = stores.plan_replay(0, first)
    yield [
        sorted(stores.reach(0)),
        [] if replay is None else [[h.pod for h in unit.state_holders] for unit in replay.units],
    ]


def draw_record(rng: random.Random, step: int) -> CommitRecord:
    said = rng.random() < 0.7
    commit = Commit(
        step=step,
        norm=1.0,
        scale=rng.choice((1.0,) * 9 + (2.0,)),
        tokens=8,
        loss=2.0,
        data="d",
        norms_sq=rng.choice(((), (0.5,))) if rng.random() < 0.2 else (),
    )
    record = CommitRecord(
        lineage=rng.choice((1,) * 9 + (0,)),
        commit=commit,
        certified_in=rng.choice(("q2-b", "q2-b", "q2-b", "q1-a", "")),
        chain=rng.choice("cccccccce"),
        gradients=("g",) if said else (),
        states=(rng.choice("ssssst"),) if said else (),
        forks=rng.choice(("f",) * 9 + ("",)),
    )
    return seal_record(record) if rng.random() < 0.9 else record


def test_whoever_changes_a_decision_raises_the_number_of_the_rules() -> None:
    rng = random.Random(20_261_126)
    digest = hashlib.sha256()
    for _ in range(400):
        for kind in (settles, steps, votes, witnesses, records, units):
            for decision in kind(rng):
                digest.update(json.dumps(decision, default=_shown).encode())
    assert DECISIONS.get(rules.NUMBER) == digest.hexdigest()[:32], (
        "trainers decide otherwise than the release before: raise rules.NUMBER and write down the "
        "new digest; if only what is drawn here has changed, the digest alone"
    )


def _shown(value: Any) -> Any:
    if isinstance(value, Partial):
        return [value.lane, value.first, value.last]
    if isinstance(value, Slot):
        return str(value)
    raise TypeError(type(value).__name__)


def test_the_number_is_told_beside_what_bits_depend_on_and_is_no_part_of_it() -> None:
    numerics = {"torch": "2.13"}
    told = rules.with_rules(numerics)
    assert told == {"torch": "2.13", "rules": str(rules.NUMBER)}
    assert rules.without_rules(told) == numerics
