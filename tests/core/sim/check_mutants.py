"""Mistakes with what checks find late: types that are wrong when others have used them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.base.ids import Slot
from mainstay_core.base.shape import Cut, Order
from mainstay_core.dmr import witness
from mainstay_core.dmr.witness import Ruling, Told
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.rank import machine as rank_machine
from mainstay_core.rank import recheck, session, settle
from mainstay_core.rank.events import DropHeld, ReportsGathered
from mainstay_core.rank.steps import doubts, step_plan
from mainstay_core.rank.steps.step_plan import UNKNOWN, Maker, Makers
from mainstay_core.sim import draw
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.scenarios.scenario import WITNESSED, Fault, Scenario
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.segments import StoreReport
from mainstay_core.wire.votes import SettleReport

WORK = ("FORWARD", "BACKWARD_INPUT")
BETWEEN = ("FORWARD", "BACKWARD_INPUT", "RECV_B", "SEND_B", "REDUCE", "reduced", "vote-posted")
"""Where a step is interrupted after something came out wrong."""


def draw_wrong_types(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which something comes out wrong, and others strike before the vote."""
    scenario, rng = draw(seed, ()), random.Random(f"wrong types {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=3,
        replicas=3,
        shards_per_lane=rng.choice((1, 2, 3)),
        stages=rng.choice((2, 2, 3)),
        order=Order.IN_ORDER,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=6,
    )
    faults = []
    for _ in range(rng.randint(2, 4)):
        point, times = rng.choice(WORK), rng.randint(1, 24)
        faults.append(Fault(kind="corrupt-type", point=point, times=times))
        faults += [
            Fault(kind=rng.choice(kinds), point=rng.choice(BETWEEN), times=rng.randint(1, 6))
            for _ in range(rng.randint(0, 2) if kinds else 0)
        ]
    config = replace(scenario.config, shape=shape, spares=1)
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


def draw_broken_chains(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which a chain breaks when a later stage has finished a wrong type.

    It computes the type again, which the run of that stage has already.
    """
    scenario, rng = draw(seed, ()), random.Random(f"broken chains {seed}")
    shape = replace(
        scenario.config.shape,
        lanes=2,
        replicas=2,
        shards_per_lane=2,
        stages=2,
        order=Order.IN_ORDER,
        micro_batches=1,
        ranks_per_stage=1,
        ranks_per_pod=1,
        steps=8,
    )
    faults = [
        fault
        for _ in range(6)
        for fault in (
            Fault(kind="corrupt-type", point="FORWARD", times=rng.randint(1, 8)),
            Fault(kind=rng.choice(kinds), point="BACKWARD_WEIGHT", times=rng.randint(1, 8)),
        )
    ]
    config = replace(scenario.config, shape=shape)
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


def _any_copies(
    plan: Plan,
    shards_per_lane: int,
    held: Mapping[int, tuple[Partial, ...]],
    makers: Makers,
    bad: Iterable[int],
) -> tuple[dict[int, tuple[Partial, ...]], dict[int, Maker]]:
    """A type that each position has counts, whoever made the copies; the longest run does."""
    del shards_per_lane, makers
    void = set(bad)
    kept = {
        index: tuple(p for p in partials if void.isdisjoint(range(p.first, p.last + 1)))
        for index, partials in held.items()
    }
    covered = [
        {t for m in ms for p in kept.get(m.index, ()) for t in range(p.first, p.last + 1)}
        for ms in plan.positions
    ]
    return kept, dict.fromkeys(set.intersection(*covered), UNKNOWN)


_SETTLE = settle.settle


def _settle_without_bad_types(
    plan: Plan,
    shards_per_lane: int,
    reports: Sequence[SettleReport],
    stores: Sequence[StoreReport],
    *rules: Any,
) -> Any:
    told = [replace(report, bad=()) for report in reports]
    return _SETTLE(plan, shards_per_lane, told, stores, *rules)


_REFUSED = vars(rank_machine)["_refused"]


def _refused_keeps_held(state: Any, verdict: Any, *rest: Any) -> Any:
    done = _REFUSED(state, verdict, *rest)
    if not verdict.state_bad:
        return done
    # Nobody remembers that the quorum refused a state; whose own is good keeps what was computed.
    kept = replace(done.state, refused_in=state.refused_in)
    if state.index in verdict.state_bad:
        return replace(done, state=kept)
    kept = replace(kept, held=state.held, held_in=state.held_in)
    actions = tuple(a for a in done.actions if not isinstance(a, DropHeld))
    return replace(done, state=kept, actions=actions)


def _believe_the_first(
    told: Sequence[Told], width: int = 1, members: Collection[Slot] = ()
) -> Ruling:
    del width, members
    newest = [one for one in told if one.asked == told[-1].asked]
    return Ruling(agreed=newest[0].telling)


def draw_swapped_witness(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of a swapped pipeline whose chains watch each other."""
    scenario = draw(seed, kinds)
    stages = max(3, scenario.config.shape.stages)
    shape = replace(scenario.config.shape, order=Order.SWAPPED, cut=Cut.EQUAL, stages=stages)
    return replace(scenario, config=replace(scenario.config, shape=shape))


def draw_tainted_guards(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one with guards that goes back before tainted steps, and is disturbed meanwhile."""
    scenario, rng = draw_swapped_witness(seed, ("stick",)), random.Random(f"guards {seed}")
    shape = replace(
        scenario.config.shape,
        stages=3,
        lanes=3,
        replicas=3,
        ranks_per_stage=1,
        micro_batches=1,
        shards_per_lane=2,
        checkpoint_every_steps=2,
        steps=12,
    )
    faults = [Fault(kind="stick", point="FORWARD", times=rng.randint(1, 40))]
    faults += [
        Fault(kind=rng.choice(kinds), point=rng.choice(GOING_BACK), times=rng.randint(1, 12))
        for _ in range(6)
    ]
    config = replace(
        scenario.config,
        shape=shape,
        spares=3,
        guards=2,
        goes_back=True,
        approximate=ApproximateConfig(after_lost_steps=0),
    )
    return replace(scenario, config=config, faults=tuple(faults))


GOING_BACK = ("FORWARD", "REDUCE", "reduced", "vote-posted", "applied")
"""Where a job that goes back is disturbed before guards have copied anew, or after."""
_ROUTES = vars(witness)["_routes"]


def _by_stage(tellings: Any, cells: Any) -> Any:
    """What is told counts in the order of the stages, as in a pipeline that all pass in order."""
    return [sorted(route, key=lambda at: at[1][0]) for route in _ROUTES(tellings, cells)]


_STEP = rank_machine.step


def _guards_outlast(state: Any, event: Any) -> Any:
    """A guard whose own state does not count goes on with what it has kept of an end."""
    done = _STEP(state, event)
    is_void = isinstance(event, ReportsGathered) and not done.state.guarded
    return replace(done, state=replace(done.state, guarded=state.guarded)) if is_void else done


INTERRUPTIONS = ("break-chain", "break-chain", "reset", "kill-meeting", "kill-trainer")

CHECK_MUTANTS = {
    "witness-not-heard": Mutant(
        "a step is committed in which two chains have computed a type differently",
        [(recheck, "heard", lambda state, verdict, _: (state, verdict, ()))],
        WITNESSED,
    ),
    "named-by-stage": Mutant(
        "in a swapped pipeline whose stage comes first is asked, not whose visit",
        [(witness, "_routes", _by_stage)],
        WITNESSED,
        draws=draw_swapped_witness,
        first=8,
    ),
    "tainted-guard-used": Mutant(
        "what a guard has copied of tainted steps counts when the job has gone back before them",
        [(rank_machine, "step", _guards_outlast)],
        ("reset", "kill-meeting"),
        draws=draw_tainted_guards,
    ),
    "asked-once": Mutant(
        "of two chains that differ the first one is believed at once",
        [(recheck, "rule", _believe_the_first)],
        WITNESSED,
    ),
    "disagreement-forgotten": Mutant(
        "a settle does not hear that chains have computed a type differently",
        [(doubts, "open_doubt", lambda *_: None)],
        WITNESSED,
        first=7,
    ),
    "account-forgotten": Mutant(
        "what a chain has computed before the vote that would compare it is not reported",
        [(session, "unheard", lambda *_: ())],
        WITNESSED,
        first=7,
    ),
    "nobody-else-asked": Mutant(
        "two that insist are asked again and again, and no other device is",
        [(recheck, "has_insisted", lambda *_: False)],
        ("stick",),
        first=2,
    ),
    "held-before-checked": Mutant(
        "a type counts as held before its checks are over",
        [(Compute, "judge", lambda _: None)],
        INTERRUPTIONS,
        draws=draw_wrong_types,
    ),
    "old-copy-preferred": Mutant(
        "what is computed again counts only where nobody has an old copy",
        [(step_plan, "_counted_copies", _any_copies)],
        ("break-chain",),
        draws=draw_broken_chains,
        first=28,
    ),
    # Where copies of two chains do not mix, what the chain has left in other stages counts no more.
    "bad-state-keeps-gradients": Mutant(
        "what the chain of a bad state has computed is kept",
        [
            (rank_machine, "_refused", _refused_keeps_held),
            (step_plan, "_counted_copies", _any_copies),
        ],
        ("corrupt-state",),
    ),
    "bad-types-not-in-the-report": Mutant(
        "a settle does not hear of types that are known to be wrong",
        [(rank_machine, "settle", _settle_without_bad_types)],
        INTERRUPTIONS,
        draws=draw_wrong_types,
    ),
}
