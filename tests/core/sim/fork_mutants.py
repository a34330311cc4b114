"""Mistakes with forks: whose states count, what is made of what, and what remembers it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.core.sim.mutants import Mutant

from mainstay_core.base import codec
from mainstay_core.base.shape import Cut, JobShape, Order
from mainstay_core.coordinator import finishing, machine, recovery, seating, situation
from mainstay_core.coordinator.events import ApproximationWithdrawn, Transition
from mainstay_core.coordinator.intake import facts
from mainstay_core.coordinator.lineage import tell_forks
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.rank import adoption
from mainstay_core.rank import machine as rank_machine
from mainstay_core.rank.forks import courses, fork_plan, histories, rules, sources
from mainstay_core.rank.state import RankState
from mainstay_core.sim import World, disk, draw
from mainstay_core.sim.compute import Compute
from mainstay_core.sim.engine import Awaited
from mainstay_core.sim.invariants.lineages import fork_rules
from mainstay_core.sim.scenarios.points import COMMIT_POINTS, FORK_POINTS
from mainstay_core.sim.scenarios.scenario import (
    FORKING,
    GUARDED,
    IN_MEMORY,
    SILENT,
    Ahead,
    Fault,
    Scenario,
)
from mainstay_core.sim.trainers import trainer
from mainstay_core.sim.trainers.guarding import TAG, GuardingTrainer
from mainstay_core.sim.trainers.trainer import Trainer
from mainstay_core.wire.plan import Member, Partial, Plan
from mainstay_core.wire.reinitialisation import Fork, History, MadePosition, OptimizerState


def draw_forks(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return a scenario in which inner stages are lost, and may be made anew."""
    return draw(seed, kinds, approximate=True)


def draw_forks_again(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one in which forks are interrupted again and again, and who was silent comes back."""
    scenario, rng = draw(seed, (), approximate=True), random.Random(f"again {seed}")
    stages = rng.choice((3, 3, 5))
    shape = replace(
        scenario.config.shape,
        lanes=1,
        replicas=1,
        stages=stages,
        ranks_per_stage=1,
        ranks_per_pod=1,
        micro_batches=1,
        steps=8,
        checkpoint_every_steps=0,
    )
    faults = []
    for _ in range(3):
        losses = ("kill-inner", *kinds)
        point, times = rng.choice(COMMIT_POINTS), rng.randint(1, 3 * stages)
        lasts_s = rng.choice((1.0, 2.0, 3.0))
        faults.append(Fault(kind=rng.choice(losses), point=point, times=times, lasts_s=lasts_s))
        faults += [
            Fault(
                kind=rng.choice(("kill-meeting", "kill-trainer", "reset", "kill-inner", "slow")),
                point=rng.choice(FORK_POINTS),
                times=rng.randint(1, 2 * stages),
                lasts_s=1.0,
            )
            for _ in range(rng.randint(1, 2))
        ]
    approximate = ApproximateConfig(after_lost_steps=0)
    config = replace(
        scenario.config,
        shape=shape,
        spares=rng.choice((0, 1, 3)),
        approximate=approximate,
        heartbeat_s=0.2,
        heartbeat_timeout_s=0.6,
    )
    return replace(scenario, config=config, slots_per_pod=1, faults=tuple(faults))


def draw_inner_ranks(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of a job with two ranks to a stage, of which one or both are lost."""
    scenario = draw_forks_again(seed, kinds)
    shape = replace(scenario.config.shape, stages=3, ranks_per_stage=2)
    return replace(scenario, config=replace(scenario.config, shape=shape, spares=3))


def draw_two_losses(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one that loses the same stage twice, and keeps checkpoints in seeds that are odd."""
    scenario, rng = draw_forks_again(seed, ()), random.Random(f"two {seed}")
    every = seed % 2
    shape = replace(scenario.config.shape, stages=3, steps=10, checkpoint_every_steps=every)
    faults = tuple(
        Fault(kind="kill-inner", point="applied", times=rng.randint(4, 9)) for _ in range(2 - every)
    )
    config = replace(scenario.config, shape=shape, spares=2)
    return replace(scenario, config=config, faults=faults)


def draw_stale(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one whose lost stages, the ends among them, may load a checkpoint of theirs alone."""
    scenario, rng = draw_forks_again(seed, kinds), random.Random(f"stale {seed}")
    shape = replace(scenario.config.shape, steps=10, checkpoint_every_steps=rng.choice((2, 3)))
    faults = [
        Fault(
            kind=rng.choice(("kill-stage", "kill-stage", "kill-inner")),
            point="applied",
            times=rng.randint(4 * shape.stages, 8 * shape.stages),
        )
    ]
    if rng.random() < 0.6:
        kind = rng.choice(("kill-meeting", "kill-trainer", "kill-stage", "reset"))
        faults.append(Fault(kind=kind, point=rng.choice(FORK_POINTS), times=rng.randint(1, 6)))
    approximate = ApproximateConfig(after_lost_steps=0, stale_steps=rng.choice((1, 2, 9)))
    config = replace(scenario.config, shape=shape, spares=3, approximate=approximate)
    return replace(scenario, config=config, faults=tuple(faults))


def _swapped(shape: JobShape, rng: random.Random) -> JobShape:
    """Return a shape with a swapped pipeline of two to four stages."""
    lanes = rng.choice((1, 1, 2))
    return replace(
        shape,
        order=Order.SWAPPED,
        cut=Cut.EQUAL,
        stages=rng.choice((2, 3, 4)),
        lanes=lanes,
        replicas=lanes,
    )


def draw_ends(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of a swapped pipeline with guards, which loses ends as well as inner stages."""
    scenario, rng = draw_forks_again(seed, kinds), random.Random(f"ends {seed}")
    shape = _swapped(scenario.config.shape, rng)
    config = replace(scenario.config, shape=shape, guards=rng.choice((1, 2)), spares=3)
    return replace(scenario, config=config)


def draw_forks_beside_snapshots(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of a job with snapshots in memory, which are complete now and then."""
    scenario, rng = draw_forks_again(seed, kinds), random.Random(f"beside {seed}")
    snapshots = draw(seed, IN_MEMORY).config.snapshots
    assert snapshots is not None
    in_order = scenario.config.shape.order is Order.IN_ORDER
    boundary = in_order and rng.random() < 0.4
    snapshots = replace(snapshots, peers=rng.choice((0, 1)), boundary=boundary)
    lost = [
        Fault(kind=rng.choice(("kill-pod", "kill-inner")), point="applied", times=times)
        for times in (4, 9)
    ]
    faults = tuple(f for pair in zip(scenario.faults, lost, strict=False) for f in pair)
    faults += scenario.faults[len(lost) :]
    spares = rng.choice((1, 3))
    config = replace(scenario.config, snapshots=snapshots, spares=spares, guards=0)
    return replace(scenario, config=config, units=rng.choice((1, 2)), faults=faults)


def draw_mute_stores(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one in which stores do not answer once when a lost stage is to be made of them."""
    scenario = draw_forks_beside_snapshots(seed, kinds)
    shape = replace(scenario.config.shape, steps=10, stages=3, lanes=1, replicas=1)
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, peers=seed % 2, boundary=False)
    config = replace(scenario.config, shape=shape, snapshots=snapshots, spares=3)
    faults = (
        Fault(kind="kill-inner", point="applied", times=15 + seed % 9),
        Fault(kind="mute-stores", point="Settle"),
    )
    return replace(scenario, config=config, faults=faults)


def draw_guards_beside_snapshots(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of a swapped pipeline with guards, and with snapshots in memory."""
    scenario, rng = draw_forks_beside_snapshots(seed, kinds), random.Random(f"both {seed}")
    shape = _swapped(scenario.config.shape, rng)
    snapshots = scenario.config.snapshots
    assert snapshots is not None
    snapshots = replace(snapshots, boundary=False)
    guards = rng.choice((1, 2))
    config = replace(scenario.config, shape=shape, snapshots=snapshots, guards=guards)
    return replace(scenario, config=config)


def draw_wrong_guards(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one of guards with the policy off: their copies become wrong, or the job goes back."""
    scenario, rng = draw_ends(seed, ()), random.Random(f"wrong {seed}")
    faults = tuple(
        Fault(kind=kind, point="applied", times=rng.randint(1, 9))
        for kind in (*kinds, rng.choice((*kinds, "slow", "reset")))
    )
    config = replace(scenario.config, approximate=None)
    return replace(scenario, config=config, faults=faults)


def draw_parting(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one whose replicas go different ways under lineages of one number, and then meet."""
    scenario = draw_forks_again(seed, ())
    shape = replace(scenario.config.shape, stages=3, lanes=2, replicas=2, min_replicas=1, steps=12)
    config = replace(scenario.config, shape=shape, spares=1)
    faults = tuple(Fault(kind=kind, point="applied", times=9) for kind in kinds)
    return replace(scenario, config=config, apis=1, faults=faults)


def draw_absent_api(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one whose api is away from the loss of a stage until all have applied the last step.

    Each cell of a stage has a place to copy into, and not all pods tell at the same moment.
    """
    scenario, rng = draw_forks_again(seed, ()), random.Random(f"absent {seed}")
    shape = replace(scenario.config.shape, stages=3, lanes=2, replicas=2, steps=6)
    absent = Fault(
        kind=rng.choice(kinds),
        point=rng.choice(FORK_POINTS),
        times=rng.randint(1, 12),
        lasts_s=rng.choice((2.0, 4.0)),
    )
    loss = Fault(kind="kill-inner", point="applied", times=rng.randint(12, 24))
    config = replace(scenario.config, shape=shape, spares=3)
    return replace(scenario, config=config, apis=1, faults=(loss, absent))


def draw_return(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one in which a stage is silent for so long that it is made anew, and comes back."""
    scenario = draw_forks_again(seed, ())
    shape = replace(scenario.config.shape, stages=3)
    config = replace(scenario.config, shape=shape, spares=3)
    faults = tuple(Fault(kind=kind, point="applied", times=8, lasts_s=4.0) for kind in kinds)
    return replace(scenario, config=config, faults=faults)


def draw_forbidden(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one in which inner stages are lost, and must not be made anew."""
    return draw(seed, kinds, approximate=False)


def draw_ahead(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one that loses stages twice, and a person allows one recovery ahead of that."""
    scenario, rng = draw_two_losses(seed - seed % 2, kinds), random.Random(f"ahead {seed}")
    limit = rng.choice((0, 1, 2))
    withdrawn_s = rng.choice((None, None, 0.0))
    person = Ahead(after_lost_steps=limit, withdrawn_after_s=withdrawn_s)
    # Guards would change nothing, and trainers to spare let no job wait.
    config = replace(scenario.config, approximate=None, spares=3)
    return replace(scenario, config=config, ahead=person)


def draw_permitted(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one whose policy is off, and a person allows one recovery by a limit of his own."""
    return draw(seed, kinds, approximate=False, ahead=True)


def ends_of(world: World) -> set[str]:
    """Digests of the histories of a run's final states."""
    return {final.history for final in world.store.last.finals}


def repeating(first: World, kinds: tuple[str, ...]) -> Scenario:
    """Return the scenario of a run that makes the forks of another run again, and has faults."""
    scenario, rng = first.scenario, random.Random(f"repeat {first.scenario.seed} {kinds}")
    told = tell_forks(first.store.last.history, first.store.job.ledger)
    repeats = tuple(codec.encode(fork) for fork in told)
    config = replace(scenario.config, repeats=repeats, approximate=None, spares=2)
    faults = tuple(
        Fault(kind=rng.choice(kinds), point=rng.choice(COMMIT_POINTS), times=rng.randint(1, 20))
        for _ in range(rng.randint(1, 3) if kinds else 0)
    )
    return replace(scenario, config=config, faults=faults)


def draw_repeats(seed: int, kinds: tuple[str, ...]) -> Scenario:
    """Return one that makes the forks of another run again, if that has any."""
    first = World(draw_forks(seed, kinds))
    first.run()
    return repeating(first, ())


async def _take_late(own: Trainer, group: Any, end: int, peer: int) -> None:
    """Take the gradient of the step before."""
    came = await Awaited(group.receive(peer, TAG))
    own.given[end], own.late = getattr(own, "late", came), came  # type: ignore[attr-defined]


def _boosts_of_all(history: History, step: int, inner: int) -> dict[str, float]:
    """Raise the learning rate of what a guard had, too."""
    boosts = _BOOSTS_OF(history, step, inner)
    exact = (b for f in history for p in f.made.positions for b in p.blocks if b.is_exact)
    return boosts | {block.block: 1.1 for block in exact}


def _of_its_lineage(state: RankState, plan: Plan, member: Member) -> bool:
    return state.lineage == plan.lineage


_BOOSTS_OF = histories.boosts_of


def _compounding(history: History, step: int, inner: int) -> dict[str, float]:
    boosts: dict[str, float] = {}
    for fork in histories.history_at(history, step):
        for block, factor in _BOOSTS_OF((fork,), step, inner).items():
            boosts[block] = boosts.get(block, 1.0) * factor
    return boosts


def _of_all_inner_ranks(history: History, step: int, inner: int) -> dict[str, float]:
    width = 1 + max((p.inner for f in history for p in f.made.positions), default=0)
    every: dict[str, float] = {}
    for other in range(max(width, inner + 1)):
        every |= _BOOSTS_OF(history, step, other)
    return every


_MAKE_ANEW = vars(Trainer)["make_anew"]


async def _make_of_turns(own: Trainer, made: MadePosition, **how: Any) -> Any:
    """Each cell adds its sources in the order in which it copied them."""
    if own.state.index % 2:
        blocks = tuple(replace(b, sources=tuple(reversed(b.sources))) for b in made.blocks)
        made = replace(made, blocks=blocks)
    return await _MAKE_ANEW(own, made, **how)


_PLAN_FORK = fork_plan.plan_fork


def _plan_without_norms(
    plan: Plan, rules: Any, positions: Any, version: int, commit: Any, *known: Any
) -> fork_plan.Forked:
    told = None if commit is None else replace(commit, norms_sq=())
    return _PLAN_FORK(plan, rules, positions, version, told, *known)


def _untold(state: Any, now_s: float) -> Transition:
    """The end of a job says nothing of its course."""
    return Transition(state=state)


_POLICY_OF = rules.policy_of


def _of_any_age(*args: Any) -> Any:
    policy = _POLICY_OF(*args)
    return replace(policy, stale_steps=1000) if policy.stale_steps else policy


def _from_nothing(*args: Any) -> Any:
    return replace(_POLICY_OF(*args), optimizer_state=OptimizerState.ZERO)


def _left_of_any_age(
    rules: Any, lost: Any, version: int, durable: int, history: Any, guards: Any
) -> Any:
    policy = replace(rules.policy, stale_steps=1000)
    return _LEFT_OF(replace(rules, policy=policy), lost, version, durable, history, guards)


_LEFT_OF = sources.left_of


def _planned_again(fork: Fork, known: fork_plan.Forked) -> fork_plan.Forked:
    """Weigh the sources alike, whatever the record says."""
    uniform = [
        replace(
            place,
            blocks=tuple(
                replace(b, sources=tuple(replace(s, weight=1 / len(b.sources)) for s in b.sources))
                for b in place.blocks
            ),
        )
        for place in fork.made.positions
    ]
    other = replace(fork, made=replace(fork.made, positions=tuple(uniform)))
    return _REPEATED(other, known)


_REPEATED = fork_plan._repeated


_FORKED = seating._forked


def _forked_in_its_lineage(state: Any, plan: Plan, positions: Sequence[int]) -> Plan:
    return replace(_FORKED(state, plan, positions), lineage=state.plan.lineage)


_SITUATION = recovery.find_situation


def _allowed(*args: Any) -> Any:
    found = _SITUATION(*args)
    return replace(found, allow_approximate=True, approximate_after_lost_steps=0)


_USE, _PERMITTED = recovery.use_permission, situation.permitted_rules


def _use_and_keep(state: Any, plan: Any) -> Any:
    used, who = _USE(state, plan)
    return replace(used, ahead=state.ahead), who


def _by_the_jobs_limit(config: Any, permission: Any = None) -> Any:
    is_ahead = permission is not None and permission.is_ahead
    return config.approximate_rules if is_ahead else _PERMITTED(config, permission)


def _deaf_to_withdrawals() -> dict[Any, Any]:
    """The coordinator's table, in which nothing that was allowed is taken back."""
    return {
        key: machine._ignore if key[1] is ApproximationWithdrawn else handler
        for key, handler in machine._TABLE.items()
    }


def _rules_of_all(config: Any) -> Any:
    allowed = draw(0, FORKING, approximate=True).config.approximate
    return fork_rules(replace(config, approximate=config.approximate or allowed))


_COMPLETE = vars(Compute)["_complete"]
_DROP_HELD, _DROP_PARTIALS = vars(Compute)["drop_held"], vars(Compute)["drop_partials"]


def _remember(own: Compute, partials: Any) -> None:
    for partial in partials:
        for number, value in enumerate(own.partials.get(partial, ())):
            vars(own).setdefault("left_over", {})[partial.first + number] = value


def _drop_held(own: Compute) -> None:
    _remember(own, list(own.partials))
    _DROP_HELD(own)


def _drop_partials(own: Compute, partials: Sequence[Partial]) -> None:
    _remember(own, partials)
    _DROP_PARTIALS(own, partials)


def _complete_with_old(own: Compute, shard_type: int, gradient: str) -> None:
    """What was computed of the step before is taken again: in one course it is the same."""
    old = vars(own).setdefault("left_over", {})
    _COMPLETE(own, shard_type, old.pop(shard_type, gradient))


def _apply_and_forget(own: Compute, *args: Any) -> None:
    _APPLY(own, *args)
    vars(own)["left_over"] = {}
    own.partials.clear()


_APPLY = vars(Compute)["apply"]

ASKED_ONCE = Mutant(
    "a store that does not answer counts as empty at once",
    [(facts, "MAX_ASKS", 0)],
    SILENT,
    draws=draw_mute_stores,
)
"""Breaks no invariant: a stage is made anew by the rules, though stores could bring it back."""

FORK_MUTANTS = {
    "fork-voids-all": Mutant(
        "under a fork's plan states of the lineage before do not count",
        [(adoption, "_is_of", _of_its_lineage)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "fork-keeps-held": Mutant(
        "what came through the lost stage counts in the step that is computed again",
        [
            (Compute, "drop_held", _drop_held),
            (Compute, "drop_partials", _drop_partials),
            (Compute, "_complete", _complete_with_old),
            (Compute, "apply", _apply_and_forget),
        ],
        FORKING,
        draws=draw_forks,
    ),
    "fork-not-in-the-history": Mutant(
        "who keeps its state does not note the fork",
        [(rank_machine, "forked", lambda state, _: state)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "fork-twice-in-the-history": Mutant(
        "a fork that is repeated is added to the history",
        [(histories, "places_of", lambda _: {(-1, -1)})],
        FORKING,
        draws=draw_forks_again,
        first=18,
    ),
    "end-tells-no-course": Mutant(
        "a job that is complete before all told that they go on does not say since when",
        [(finishing, "_tell_course", _untold)],
        ("kill-api", "cut-api"),
        draws=draw_absent_api,
        first=12,
    ),
    "boost-compounds": Mutant(
        "a second loss of a stage raises its learning rate once more",
        [(trainer, "boosts_of", _compounding)],
        FORKING,
        draws=draw_two_losses,
    ),
    "boost-of-all-inner-ranks": Mutant(
        "an inner rank that was not made anew learns faster, too",
        [(trainer, "boosts_of", _of_all_inner_ranks)],
        FORKING,
        draws=draw_inner_ranks,
        first=18,
    ),
    "guard-a-step-behind": Mutant(
        "a guard applies the gradient of the step before",
        [(GuardingTrainer, "take_guarded", _take_late)],
        FORKING,
        draws=draw_ends,
    ),
    "void-guard-kept": Mutant(
        "a guard keeps a copy that a vote has found to be another one than the owners'",
        [(rank_machine, "void_copies", lambda *_: ())],
        GUARDED,
        draws=draw_wrong_guards,
    ),
    "guard-of-another-history": Mutant(
        "a guard keeps its copy though its own state is another one now",
        [(rank_machine, "_GONE", {"valid": False, "held": (), "mark": None})],
        ("kill-inner",),
        draws=draw_wrong_guards,
    ),
    "any-age-is-young": Mutant(
        "a stage loads its own checkpoint alone, however old that is",
        [
            (rules, "policy_of", _of_any_age),
            (sources, "left_of", _left_of_any_age),
            (fork_plan, "left_of", _left_of_any_age),
        ],
        FORKING,
        draws=draw_stale,
    ),
    "moments-from-nothing": Mutant(
        "the optimizer's state begins from nothing, though it is to be the sources' average",
        [(rules, "policy_of", _from_nothing)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "repeated-of-other-sources": Mutant(
        "a fork of another run is made again of what the last commit here gives",
        [(fork_plan, "_repeated", _planned_again)],
        FORKING,
        draws=draw_repeats,
        first=1,
    ),
    "boost-of-what-guards-had": Mutant(
        "what a guard had learns faster, though it is as it was",
        [(trainer, "boosts_of", _boosts_of_all)],
        FORKING,
        draws=draw_ends,
    ),
    "sources-by-turns": Mutant(
        "each cell adds the sources in another order",
        [(Trainer, "make_anew", _make_of_turns)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "weights-without-norms": Mutant(
        "the weights do not follow from the last commit's norms",
        [(fork_plan, "plan_fork", _plan_without_norms)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "fork-in-its-lineage": Mutant(
        "a fork begins no lineage",
        [(seating, "_forked", _forked_in_its_lineage)],
        FORKING,
        draws=draw_forks,
        first=1,
    ),
    "courses-mixed": Mutant(
        "a state of another course counts, as its lineage has the number",
        [(courses, "of_one_course", lambda _, reports: (list(reports), frozenset()))],
        ("part-ways",),
        draws=draw_parting,
        first=18,
    ),
    "way-back-removed": Mutant(
        "the newest exact checkpoint goes while the job is approximate",
        [(disk, "find_way_back", lambda _: None)],
        FORKING,
        draws=draw_two_losses,
    ),
    "fork-without-permission": Mutant(
        "nobody looks whether a job may go on approximately",
        [(recovery, "find_situation", _allowed), (trainer, "fork_rules", _rules_of_all)],
        FORKING,
        draws=draw_forbidden,
    ),
    "permission-used-twice": Mutant(
        "what a person has allowed for one recovery counts for the next one, too",
        [(recovery, "use_permission", _use_and_keep)],
        FORKING,
        draws=draw_ahead,
    ),
    "permission-without-its-limit": Mutant(
        "a permission is used though the job would lose no more steps than its giver would",
        [(situation, "permitted_rules", lambda config, _=None: _PERMITTED(config))],
        FORKING,
        draws=draw_ahead,
    ),
    "permission-by-the-jobs-limit": Mutant(
        "a permission is used by the job's own limit on lost steps, not by its giver's",
        [(situation, "permitted_rules", _by_the_jobs_limit)],
        FORKING,
        draws=draw_permitted,
        first=1,
    ),
    "withdrawal-unheard": Mutant(
        "what was allowed and taken back is used",
        [(machine, "_TABLE", _deaf_to_withdrawals())],
        FORKING,
        draws=draw_ahead,
        first=6,
    ),
}
