"""Draws a scenario from a seed: the job's shape, its surroundings, and the faults it meets.

What came later is drawn apart from everything else, so that a seed without it is what it was.
"""

from __future__ import annotations

import random
from dataclasses import replace

from mainstay_core.base.ids import JobUid
from mainstay_core.base.shape import JobShape
from mainstay_core.dmr.witness import MIN_CHAINS
from mainstay_core.job.config import (
    LAG_STEPS,
    OPTIMIZER_STATES,
    ORDERINGS,
    WEIGHTINGS,
    ApproximateConfig,
    JobConfig,
    SnapshotConfig,
)
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.sim.network import Latency
from mainstay_core.sim.scenarios.fault_draws import (
    LOSSES,
    draw_cascade,
    draw_fault,
    draw_faults,
    draw_forks,
    draw_losses,
)
from mainstay_core.sim.scenarios.ordering import SHARE_SWAPPED, SHARE_SWAPPED_FORKS, with_order
from mainstay_core.sim.scenarios.points import (
    COPY_POINTS,
    PAUSE_POINTS,
    READ_POINTS,
    RULED_BETWEEN,
)
from mainstay_core.sim.scenarios.scenario import (
    APART,
    CHECKED,
    FORKING,
    IN_MEMORY,
    KINDS,
    LASTING,
    PLANNED,
    SILENT,
    WITNESSED,
    Ahead,
    Fault,
    Scenario,
)

SHARE_WITH_SNAPSHOTS = 0.35
SHARE_WITH_LITTLE_MEMORY = 0.2
"""Share of the seeds with snapshots whose stores are too small."""
SHARE_THAT_LASTS = 0.15
"""Share of the seeds that meet such a fault."""
MORE_THAN_CHANCE = 6
"""Quorums in a row that a network slower than its bound on connecting hardly ends by itself."""
SHARE_CHECKED = 0.3
"""Share of the seeds in which something is computed wrongly."""
SHARE_WITH_STALE_COPIES = 0.3
SHARE_WITH_INNER_STAGES = 0.3
"""Of the jobs without snapshots in memory, from which a lost stage would be made anew exactly."""
SHARE_WITH_PERMISSION = 0.75
"""Of those jobs."""
SHARE_AHEAD = 0.5
"""Of those without it: a person gives a permission ahead of a loss, for one recovery."""
SHARE_WITHDRAWN = 0.25
"""Of these permissions."""
LIMITS = (0, 0, 1, 2, 4)
"""The most steps that a job loses rather than make a stage anew: by its policy, or as a person says
who allows it once. Each is drawn by itself."""
SHARE_BESIDE_SNAPSHOTS = 0.5
"""Of the jobs of which it is said whether stages may be made anew: some of these have snapshots."""
SHARE_WITH_MUTE_STORES = 0.4
"""Of the seeds with snapshots that may meet such a fault."""
SHARE_GOING_BACK = 0.5
SHARE_WITH_LOSSES = 0.6
"""Of the seeds with a witness: something is lost before chains are ruled on."""
LOST_BESIDE = ("kill-trainer", "kill-pod", "kill-meeting", "reset", "break-chain")
SHARE_WITH_LOST_COPIERS = 0.15
"""Of the seeds with snapshots: something is lost right behind a copy."""
SHARE_WITH_BOUNDARIES = 0.5
"""Of the jobs with snapshots that may log boundaries."""
SHARE_WITH_CASCADES = 0.7
"""Of those jobs, in which more is lost while a lost stage is computed again."""


def draw(
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    *,
    approximate: bool | None = None,
    ahead: bool = False,
) -> Scenario:
    """Return the scenario of a seed.

    Args:
        seed: any number.
        kinds: the kinds of faults to draw from; none for an undisturbed run.
        approximate: whether it is a job whose inner stages are lost, with permission to make one
            anew, or without; None: the seed draws that, too.
        ahead: of one without, whether a person allows one recovery ahead of a loss. Where the seed
            draws whether there is permission, it draws that, too.
    """
    if approximate is not None:
        # From snapshots a lost stage is mostly made anew exactly.
        beside = random.Random(f"beside {seed}").random() < SHARE_BESIDE_SNAPSHOTS
        kinds = tuple(k for k in kinds if beside or k not in IN_MEMORY)
        kinds = (*kinds, *(k for k in FORKING if k not in kinds))
    rng = random.Random(f"scenario {seed}")
    shape = _draw_shape(rng)
    heartbeat_s = rng.choice((0.2, 0.2, 1.0))
    config = JobConfig(
        job=JobUid("job"),
        name="job",
        shape=shape,
        entrypoint="",
        workload={},
        redundancy=rng.choice((None, 1, min(2, shape.lanes))),
        heartbeat_s=heartbeat_s,
        heartbeat_timeout_s=heartbeat_s * rng.choice((3.0, 5.0)),
        hang_s=20.0,
        connect_s=rng.choice((1.0, 4.0)),
        probe_s=0.3,
        handover_s=rng.choice((2.0, 10.0)),
        hold_back_max_s=10.0,
        restart_grace_s=rng.choice((0.5, 3.0)),
        startup_deadline_s=240.0,
    )
    latency = rng.choice(
        (
            Latency(),
            Latency(base_s=2e-3, tail_s=0.05, tail_probability=0.05),
            Latency(base_s=1e-3, tail_s=1.5, tail_probability=0.01),
        )
    )
    scenario = Scenario(
        seed=seed,
        config=replace(config, spares=rng.choice((0, 0, 1, 2))),
        slots_per_pod=shape.ranks_per_pod,
        apis=rng.choice((1, 1, 2)),
        latency=latency,
        block_s=rng.choice(((0.005, 0.03), (0.005, 0.03), (0.03, 0.15))),
        skew_s=rng.choice((0.0, 100.0)),
        restarts_in_place=rng.random() < 0.3,
        faults=draw_faults(rng, tuple(k for k in kinds if k not in APART)),
    )
    scenario = _with_what_lasts(_with_wishes(scenario, kinds), kinds)
    if kinds and set(kinds) <= set(WITNESSED):
        return with_order(_with_witness(scenario, kinds))
    scenario = _with_inner_stages(_with_snapshots(scenario, kinds), kinds, approximate)
    if ahead or (approximate is None and random.Random(f"ahead {seed}").random() < SHARE_AHEAD):
        scenario = _with_permission_ahead(scenario)
    share = SHARE_SWAPPED if approximate is None else SHARE_SWAPPED_FORKS
    return with_order(_with_what_is_checked(scenario, kinds), kinds, share)


def _with_witness(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario whose chains watch each other, and one device that is wrong."""
    rng = random.Random(f"witness {scenario.seed}")
    lanes = rng.choice((2, 3, 3, 4))
    # The output of a single stage goes nowhere in the played arithmetic.
    stages = max(2, scenario.config.shape.stages)
    width = random.Random(f"witnessed cells {scenario.seed}").choice((1, 1, 2))
    shape = replace(
        scenario.config.shape,
        lanes=lanes,
        replicas=lanes,
        ranks_per_stage=width,
        ranks_per_pod=1,
        stages=stages,
        steps=lanes * (lanes - 1) + 3,
    )
    # Of two that differ only a third device says which one is wrong.
    spares = max(scenario.config.spares, int(lanes == MIN_CHAINS))
    goes_back = random.Random(f"taint {scenario.seed}").random() < SHARE_GOING_BACK
    config = replace(scenario.config, shape=shape, spares=spares, witness_every_steps=1)
    config = replace(config, goes_back=goes_back)
    point = rng.choice(("FORWARD", "vote-posted"))
    times = rng.randint(1, 12 if lanes == MIN_CHAINS else 40)
    faults = [Fault(kind=rng.choice(kinds), point=point, times=times)]
    if rng.random() < SHARE_WITH_LOSSES:
        kind, point = rng.choice(LOST_BESIDE), rng.choice(RULED_BETWEEN)
        faults.append(Fault(kind=kind, point=point, times=rng.randint(1, 16)))
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


def _with_what_is_checked(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario, in some seeds with values that come out wrong among its faults.

    They are drawn apart, like wishes.
    """
    checked = tuple(k for k in kinds if k in CHECKED)
    rng = random.Random(f"checks {scenario.seed}")
    always = len(checked) == len(kinds)
    if not checked or (not always and rng.random() > SHARE_CHECKED):
        return scenario
    faults = list(scenario.faults)
    for _ in range(rng.randint(1, 3)):
        place = rng.randint(0, len(faults))
        faults.insert(place, draw_fault(rng, rng.choice(checked)))
    return replace(scenario, faults=tuple(faults))


def _with_inner_stages(
    scenario: Scenario, kinds: tuple[str, ...], approximate: bool | None
) -> Scenario:
    """Return the scenario, in some seeds of a job that loses stages which have two neighbours.

    Mostly it may make them anew. All this is drawn apart, like wishes.
    """
    forking = tuple(k for k in kinds if k in FORKING)
    rng = random.Random(f"forks {scenario.seed}")
    always = len(forking) == len(kinds) or approximate is not None
    may = bool(forking) and (scenario.config.snapshots is None or approximate is not None)
    if not may or (not always and rng.random() > SHARE_WITH_INNER_STAGES):
        return scenario
    permission = rng.random() < SHARE_WITH_PERMISSION if approximate is None else approximate
    shape, every = scenario.config.shape, scenario.config.shape.checkpoint_every_steps
    stages, lanes = rng.choice((3, 3, 4, 5)), rng.choice((1, 1, 2, 2, 3))
    shape = replace(
        shape,
        stages=stages,
        lanes=lanes,
        replicas=lanes,
        ranks_per_stage=rng.choice((1, 1, 1, 2)) if lanes * stages <= 6 else 1,
        steps=shape.steps + rng.randint(0, 6),
        # Where checkpoints are young, nothing is made anew.
        checkpoint_every_steps=rng.choice((every, 3, 5)) if every else 0,
    )
    how = ApproximateConfig(
        after_lost_steps=rng.choice(LIMITS),
        weights=rng.choice((WEIGHTINGS[0], WEIGHTINGS[0], *WEIGHTINGS)),
        lr_boost=rng.choice((1.0, 1.1, 1.25)),
        boost_steps=rng.choice((None, None, 1, 3)),
        stale_steps=_draw_stale_steps(scenario.seed),
        wait_s=_draw_wait_s(scenario.seed),
        optimizer_state=_draw_optimizer_state(scenario.seed),
    )
    config = replace(
        scenario.config,
        shape=shape,
        redundancy=rng.choice((None, 1)),
        spares=rng.choice((scenario.config.spares, 1, 2)),
        approximate=how if permission else None,
        permitted=None if permission else how,
    )
    faults = list(scenario.faults)
    if not any(f.kind == "corrupt-state" for f in faults):  # its good copies must not die
        for _ in range(rng.choice((1, 1, 2, 3))):
            place = rng.randint(0, len(faults))
            faults[place:place] = draw_forks(rng, shape.num_ranks, forking)
    return replace(scenario, config=config, faults=tuple(faults))


def _with_permission_ahead(scenario: Scenario) -> Scenario:
    """Return the scenario with a person who allows one recovery ahead, if it has rules alone.

    That person's limit on lost steps is not the job's: one must not be taken for the other.
    """
    rng = random.Random(f"person {scenario.seed}")
    if scenario.config.permitted is None or scenario.config.approximate is not None:
        return scenario
    withdrawn_s = rng.choice((0.1, 0.5, 1.5)) if rng.random() < SHARE_WITHDRAWN else None
    person = Ahead(
        at_s=rng.choice((0.0, 0.0, 0.3, 1.0, 3.0)),
        after_lost_steps=random.Random(f"limit {scenario.seed}").choice(LIMITS),
        withdrawn_after_s=withdrawn_s,
    )
    return replace(scenario, ahead=person)


def _draw_stale_steps(seed: int) -> int:
    """Return how old a checkpoint may be that a lost stage loads alone; 0: none does. Apart."""
    rng = random.Random(f"stale {seed}")
    return rng.choice((2, 4, 8)) if rng.random() < SHARE_WITH_STALE_COPIES else 0


def _draw_optimizer_state(seed: int) -> str:
    """Return how the optimizer's state begins of what is made of other stages. Apart."""
    return random.Random(f"moments {seed}").choice(OPTIMIZER_STATES)


def _draw_wait_s(seed: int) -> float:
    """Return how long who was cut off is waited for. Apart."""
    return random.Random(f"wait {seed}").choice((0.0, 0.0, 0.0, 1.0, 3.0))


def _with_snapshots(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario with snapshots in memory, in some seeds, and what may become of them.

    They are drawn apart, like wishes.
    """
    of_memory = tuple(k for k in kinds if k in IN_MEMORY)
    rng = random.Random(f"snapshots {scenario.seed}")
    always = len(of_memory) == len(kinds)
    if not of_memory or (not always and rng.random() > SHARE_WITH_SNAPSHOTS):
        return scenario
    snapshots = SnapshotConfig(
        # Now and then no store has room for all that it is sent.
        memory_bytes=PAGE_BYTES * rng.choice((1 << 20, 1 << 20, 1 << 20, rng.randint(10, 90))),
        num_instalments=rng.choice((0, 0, 1, 2, 3)),
        peers=rng.choice((0, 1, 1, 2, 2)),
        domains=rng.choice((1, 2)),
        boundary=_draw_boundary(scenario),
    )
    shape = replace(scenario.config.shape, steps=scenario.config.shape.steps + rng.randint(0, 6))
    # Drawn apart: what else a seed draws does not depend on it.
    ordering = random.Random(f"ordering {scenario.seed}").choice(ORDERINGS)
    snapshots = replace(snapshots, ordering=ordering)
    config = replace(scenario.config, shape=shape, snapshots=snapshots)
    faults = list(scenario.faults)
    # Of a corrupt state the good copies must not die, see draw_faults.
    losses = () if any(f.kind == "corrupt-state" for f in faults) else LOSSES
    for _ in range(rng.randint(1, 2)):
        place = rng.randint(0, len(faults))
        faults[place:place] = draw_losses(rng, shape.num_ranks, of_memory, losses)
    units = rng.choice((1, 2, 3))
    drawn = _with_little_memory(replace(scenario, config=config, units=units, faults=tuple(faults)))
    drawn = _with_mute_stores(drawn, kinds)
    drawn = _with_lost_copiers(drawn) if losses else drawn
    return _with_losses_in_replays(drawn) if snapshots.boundary and losses else drawn


def _with_little_memory(scenario: Scenario) -> Scenario:
    """Return the scenario, in some seeds with stores that are just too small for two windows.

    What is older goes for the window in flight then. They are drawn apart: the rest is as before.
    """
    rng, snapshots = random.Random(f"memory {scenario.seed}"), scenario.config.snapshots
    assert snapshots is not None
    if rng.random() > SHARE_WITH_LITTLE_MEMORY:
        return scenario
    # A state of n units takes n (n + 1) pages, a gradient half of them (units.size_of).
    state = scenario.units * (scenario.units + 1)
    steps = 2 * ((snapshots.num_instalments or 2) + LAG_STEPS)
    of_position = 2 * state + steps * state // 2
    copies = scenario.slots_per_pod * (1 + snapshots.peers)
    whole = copies * of_position / scenario.config.shape.replicas
    memory_bytes = PAGE_BYTES * max(state, round(whole * rng.uniform(0.3, 0.8)))
    config = replace(scenario.config, snapshots=replace(snapshots, memory_bytes=memory_bytes))
    return replace(scenario, config=config)


def _with_mute_stores(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario, in some seeds with stores that do not answer once. They are drawn apart:
    the rest is as before.
    """
    rng = random.Random(f"mute {scenario.seed}")
    if not set(SILENT) & set(kinds) or rng.random() > SHARE_WITH_MUTE_STORES:
        return scenario
    faults = list(scenario.faults)
    fault = Fault(kind=SILENT[0], point=rng.choice(READ_POINTS), times=rng.randint(1, 3))
    faults.insert(rng.randint(0, len(faults)), fault)
    return replace(scenario, faults=tuple(faults))


def _with_lost_copiers(scenario: Scenario) -> Scenario:
    """Return the scenario, in some seeds with a loss where a part of the state has been copied.

    It is drawn apart: the rest is as before.
    """
    rng = random.Random(f"copiers {scenario.seed}")
    if rng.random() > SHARE_WITH_LOST_COPIERS:
        return scenario
    faults, times = list(scenario.faults), rng.randint(1, 3 * scenario.config.shape.num_ranks)
    fault = replace(draw_fault(rng, rng.choice(LOSSES)), at_s=None)
    fault = replace(fault, point=rng.choice(COPY_POINTS), times=times)
    faults.insert(rng.randint(0, len(faults)), fault)
    return replace(scenario, faults=tuple(faults))


def _draw_boundary(scenario: Scenario) -> bool:
    """Return whether boundaries are logged. Drawn apart: the rest is as with gradients."""
    rng = random.Random(f"boundary {scenario.seed}")
    return scenario.config.shape.ranks_per_stage == 1 and rng.random() < SHARE_WITH_BOUNDARIES


def _with_losses_in_replays(scenario: Scenario) -> Scenario:
    """Return the scenario, mostly with a lost stage and more that goes wrong while it is replayed.

    What is lost then may be the stage that is replayed, one beside it, or another one. It is drawn
    apart: the rest is as with gradients.
    """
    rng = random.Random(f"replays {scenario.seed}")
    if rng.random() > SHARE_WITH_CASCADES:
        return scenario
    num_ranks, faults = scenario.config.shape.num_ranks, list(scenario.faults)
    place = rng.randint(0, len(faults))
    faults[place:place] = draw_cascade(rng, num_ranks)
    return replace(scenario, faults=tuple(faults))


def _with_what_lasts(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario with a fault that never ends among its faults, in some seeds.

    It is drawn apart, like wishes. A corrupt state is not beside it: the good copies of that state
    might be those that cannot be had.
    """
    lasting = tuple(k for k in kinds if k in LASTING)
    rng = random.Random(f"lasting {scenario.seed}")
    always = len(lasting) == len(kinds)
    if not lasting or (not always and rng.random() > SHARE_THAT_LASTS):
        return scenario
    if any(f.kind == "corrupt-state" for f in scenario.faults):
        return scenario
    fault = draw_fault(rng, rng.choice(lasting))
    place = rng.randint(0, len(scenario.faults))
    faults = (*scenario.faults[:place], fault, *scenario.faults[place:])
    after = rng.choice((1, 2, 3))
    if scenario.latency.tail_s > scenario.config.connect_s:
        after = MORE_THAN_CHANCE  # connections of living ranks run out of time by themselves
    config = replace(scenario.config, escalate_after=after)
    return replace(scenario, config=config, faults=faults)


def _with_wishes(scenario: Scenario, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario with wishes among its faults, in some seeds.

    They are drawn apart from everything else: a seed without them is what it was before
    there were any.
    """
    wishes = tuple(k for k in kinds if k in PLANNED)
    if any(f.kind == "corrupt-state" for f in scenario.faults):
        # A replica that is dropped at that boundary may be one of the majority that it takes.
        wishes = tuple(k for k in wishes if k != "scale")
    rng = random.Random(f"wishes {scenario.seed}")
    if not wishes or (len(wishes) < len(kinds) and rng.random() < 0.5):
        return scenario
    faults = list(scenario.faults)
    others = sorted({f.kind for f in faults})
    for _ in range(rng.randint(1, 3)):
        wish = draw_fault(rng, rng.choice(wishes))
        place = rng.randint(0, len(faults))
        faults.insert(place, wish)
        if others and wish.kind == "suspend" and rng.random() < 0.5:
            fault = draw_fault(rng, rng.choice(others))
            point, times = rng.choice(PAUSE_POINTS), rng.randint(1, 6)
            meets = replace(fault, at_s=None, point=point, times=times)
            faults.insert(place + 1, meets)
    shape = scenario.config.shape
    every = shape.checkpoint_every_steps
    if any(f.kind == "suspend" for f in faults) and rng.random() < 0.9:
        every = every or rng.choice((1, 2, 3))
    shape = replace(shape, steps=shape.steps + rng.randint(0, 8), checkpoint_every_steps=every)
    storage = "checkpoints" if every else ""
    config = replace(scenario.config, shape=shape, checkpoint_dir=storage)
    return replace(scenario, config=config, faults=tuple(faults))


def _draw_shape(rng: random.Random) -> JobShape:
    lanes, stages = rng.choice((1, 2, 2, 2, 3, 3, 4)), rng.choice((1, 1, 2, 2, 3))
    width = rng.choice((1, 1, 1, 2)) if lanes * stages <= 6 else 1
    return JobShape(
        lanes=lanes,
        shards_per_lane=rng.choice((1, 2) if lanes > 1 else (1, 2, 3)),
        replicas=lanes,
        min_replicas=1,
        stages=stages,
        ranks_per_stage=width,
        ranks_per_pod=rng.choice((1, 1, 2)),
        micro_batches=rng.choice((1, 1, 2)),
        steps=rng.randint(3, 9),
        seed=0,
        checkpoint_every_steps=rng.choice((0, 1, 2)),
    )
