from __future__ import annotations

from collections import Counter
from dataclasses import replace
from inspect import getcoroutinestate

import pytest
from tests.core.sim.boundary_mutants import (
    BOUNDARY_MUTANTS,
    LOSSES_OF_CELLS,
    draw_cascades,
    draw_cells,
    draw_further_losses,
    draw_refusals,
)
from tests.core.sim.check_mutants import (
    CHECK_MUTANTS,
    INTERRUPTIONS,
    draw_broken_chains,
    draw_tainted_guards,
    draw_wrong_types,
)
from tests.core.sim.fork_mutants import (
    ASKED_ONCE,
    FORK_MUTANTS,
    draw_ahead,
    draw_ends,
    draw_forbidden,
    draw_forks,
    draw_forks_beside_snapshots,
    draw_guards_beside_snapshots,
    draw_inner_ranks,
    draw_mute_stores,
    draw_parting,
    draw_return,
    draw_stale,
    draw_wrong_guards,
    ends_of,
    repeating,
)
from tests.core.sim.memory_mutants import MEMORY_MUTANTS, draw_lone_pod, draw_short
from tests.core.sim.mutants import MUTANTS, applied, draw_deaths_with_bad_states, find
from tests.core.sim.taint_mutants import BESIDE, TAINT_MUTANTS, draw_lost_stores, draw_lost_words

from mainstay_core.base.shape import Order
from mainstay_core.dmr.witness import MIN_CHAINS
from mainstay_core.sim import World, draw, simulate
from mainstay_core.sim.engine import Engine, Process
from mainstay_core.sim.scenarios.points import COPY_POINTS
from mainstay_core.sim.scenarios.scenario import (
    FORKING,
    GUARDED,
    IN_MEMORY,
    KINDS,
    LASTING,
    PLANNED,
    WITNESSED,
    Fault,
)

SEEDS_PER_TEST = 10
ALL_MUTANTS = {
    **MUTANTS,
    **MEMORY_MUTANTS,
    **BOUNDARY_MUTANTS,
    **CHECK_MUTANTS,
    **FORK_MUTANTS,
    **TAINT_MUTANTS,
}


def few_or_all(few: range, everything: range) -> pytest.MarkDecorator:
    """Run a test over few seeds; ``make chaos`` runs it over all that once found something."""
    whole = pytest.param(everything, marks=pytest.mark.chaos)
    return pytest.mark.parametrize("seeds", [few, whole], ids=["few", "all"])


@pytest.mark.parametrize(
    "first",
    [
        *range(0, 20, SEEDS_PER_TEST),
        *(pytest.param(n, marks=pytest.mark.chaos) for n in range(20, 40, SEEDS_PER_TEST)),
    ],
)
def test_every_invariant_holds_whatever_a_seed_draws(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        outcome = simulate(draw(seed))
        assert not outcome.violation, f"mainstay sim --seed {seed} --trace: {outcome.violation}"


def test_every_invariant_holds_where_the_pipeline_is_swapped() -> None:
    swapped = [s for s in map(draw, range(60)) if s.config.shape.order is Order.SWAPPED]
    assert len(swapped) > 4
    for scenario in swapped:
        stages = {2: 4}.get(scenario.config.shape.stages, scenario.config.shape.stages)
        shape = replace(scenario.config.shape, stages=stages)
        outcome = simulate(replace(scenario, config=replace(scenario.config, shape=shape)))
        assert not outcome.violation, f"seed {scenario.seed}: {outcome.violation}"


@pytest.mark.parametrize("approximate", [True, False])
def test_half_of_the_jobs_that_lose_whole_stages_are_swapped(approximate: bool) -> None:
    drawn = [draw(seed, approximate=approximate).config.shape.order for seed in range(400)]
    assert 0.45 < drawn.count(Order.SWAPPED) / len(drawn) < 0.55


def test_a_check_copes_with_a_store_that_gives_a_number_twice() -> None:
    outcome = simulate(draw(7987))
    assert not outcome.violation, outcome.violation


def test_a_step_that_the_members_left_rolled_over_is_made_again_from_their_stores() -> None:
    outcome = simulate(draw(25008))
    assert not outcome.violation, outcome.violation
    assert outcome.seen["replayed"]


def test_what_a_store_could_not_send_in_a_cut_is_no_matter_of_another_one() -> None:
    outcome = simulate(draw(25100))
    assert not outcome.violation, outcome.violation


def test_what_a_quorum_writes_that_has_a_successor_is_where_that_one_looks_for_it() -> None:
    outcome = simulate(draw(333))
    assert not outcome.violation, outcome.violation


def test_spares_make_a_job_anew_whose_pods_with_trainers_are_all_lost() -> None:
    """They hold copies of the state like any pod, and hear of commits from pods with trainers."""
    for seed in range(4):
        outcome = simulate(draw_lone_pod(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        assert outcome.seen["replayed"], f"seed {seed}"


def test_a_store_whose_trainer_is_new_hears_late_which_window_is_complete() -> None:
    outcome = simulate(draw(701205))
    assert not outcome.violation, outcome.violation


def test_pods_that_are_lost_one_after_another_in_a_window_take_no_commit_with_them() -> None:
    outcome = simulate(draw(702068))
    assert not outcome.violation, outcome.violation


def test_a_right_state_that_nothing_tells_from_a_corrupt_one_is_given_up_with_it() -> None:
    """Two copies differ, so that no majority counts: what all go back to is older than a commit."""
    outcome = simulate(draw(729631, approximate=True))
    assert not outcome.violation, outcome.violation


def test_a_network_that_ends_quorums_by_itself_ends_no_job() -> None:
    """Connections of living ranks run out of time there, four times in a row with this seed."""
    outcome = simulate(draw(730300, approximate=False))
    assert not outcome.violation, outcome.violation


def test_who_hears_the_reports_of_a_settle_late_is_in_a_newer_quorum_at_once() -> None:
    outcome = simulate(draw(900501, approximate=False, ahead=True))
    assert not outcome.violation, outcome.violation


def test_a_complete_window_does_without_copies_of_one_that_was_given_up() -> None:
    outcome = simulate(draw(720058, approximate=False))
    assert not outcome.violation, outcome.violation
    assert outcome.seen["evicted"]


def test_a_damaged_copy_of_a_window_that_became_complete_leaves_the_checkpoint() -> None:
    """The store let the window before go for that one, and nobody sees a damage before it reads."""
    outcome = simulate(draw(303995, ("damage-segment",)))
    assert not outcome.violation, outcome.violation


def test_a_quorum_that_is_behind_writes_what_one_that_is_ahead_removes() -> None:
    outcome = simulate(draw(700396))
    assert not outcome.violation, outcome.violation


def test_a_store_that_has_not_heard_of_a_plan_may_have_to_send_for_it() -> None:
    outcome = simulate(draw(126, kinds=IN_MEMORY))
    assert not outcome.violation, outcome.violation


def test_nothing_but_the_first_plan_without_faults() -> None:
    for seed in range(10):
        outcome = simulate(draw(seed, kinds=()))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        if draw(seed).latency.tail_s < 1:
            assert outcome.num_plans == 1, f"seed {seed}: {outcome.seen}"


def test_nobody_is_left_out_because_the_control_plane_was_away() -> None:
    for seed in range(15):
        scenario = draw(seed, kinds=("kill-api", "store-outage"))
        outcome = simulate(scenario)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        if scenario.latency.tail_s < 1:
            assert outcome.num_plans == 1, f"seed {seed}: {outcome.seen}"


def test_nothing_is_lost_or_done_again_by_what_is_planned() -> None:
    for seed in range(12):
        scenario = draw(seed, kinds=PLANNED)
        outcome = simulate(scenario)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        if scenario.latency.tail_s < 1:
            assert not outcome.seen.get("plan restart"), f"seed {seed}: {outcome.seen}"
            assert not outcome.seen.get("group connected again"), f"seed {seed}: {outcome.seen}"


def test_replicas_come_and_go_between_steps() -> None:
    for seed in range(12):
        scenario = draw(seed, kinds=("scale",))
        outcome = simulate(scenario)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        if scenario.latency.tail_s < 1:
            assert outcome.seen["unplanned"] == 1, f"seed {seed}: {outcome.seen}"
            assert not outcome.seen.get("group connected again"), f"seed {seed}: {outcome.seen}"


def test_a_hand_over_connects_no_group_whose_members_stay() -> None:
    kept = 0
    for seed in range(24):
        outcome = simulate(draw(seed, kinds=("drain",)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        kept += outcome.seen.get("group kept", 0)
        # Where a plan overtakes the one before, some members have not settled in that.
        if outcome.seen["unplanned"] == 1 and outcome.seen.get("plan hand-over") == 1:
            assert not outcome.seen.get("group connected again"), f"seed {seed}: {outcome.seen}"
    assert kept


@few_or_all(range(7), range(12))
def test_a_bad_state_is_found_whoever_ends_before_the_vote_while_most_copies_are_right(
    seeds: range,
) -> None:
    for seed in seeds:
        outcome = simulate(draw_deaths_with_bad_states(seed, ("kill-trainer",)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"


@few_or_all(range(7), range(12))
def test_a_recovery_that_repeats_itself_escalates_and_the_job_goes_on(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(draw(seed, kinds=LASTING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["plan re-form"]


@few_or_all(range(4, 25), range(30))
def test_a_lost_stage_is_made_anew_from_the_memory_of_pods(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(draw(seed, kinds=IN_MEMORY))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["plan replay"]
    assert seen["replayed"]
    assert seen["replayed after another order"] <= seen["replayed"]
    assert seen["replayed after another order"], "a loss meets units in an order that has changed"
    for point in COPY_POINTS:
        assert seen[f"fault at {point}"]


@few_or_all(range(7), range(12))
def test_a_lost_inner_stage_is_made_anew_and_what_follows_is_a_function_of_the_history(
    seeds: range,
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(draw_forks(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["made anew"]
    assert seen["ended approximate"]
    assert seen["approximate checkpoint"]


def test_replicas_that_went_different_ways_under_one_number_go_on_on_one_of_them() -> None:
    """The store has given the number twice."""
    seen: Counter[str] = Counter()
    for seed in (8, 11):
        outcome = simulate(draw_parting(seed, ("part-ways",)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["fork"] == 4, "each of the two has made its own, in each run"
    assert seen["of another course"]


def test_who_comes_back_with_a_lost_stages_true_state_tells_that_it_is_refused() -> None:
    for seed in (0, 3):
        outcome = simulate(draw_return(seed, ("stop-inner",)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        assert min(outcome.seen["fork"], outcome.seen["state refused"]) > 0


def test_an_end_of_a_swapped_pipeline_is_made_anew_with_what_its_guards_have() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        outcome = simulate(draw_ends(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["fork with guards"]
    assert seen["ended approximate"]


def test_fewer_guards_than_wanted_serve_where_a_job_has_fewer_replicas_and_the_bits_are_exact() -> (
    None
):
    """As after a scale-down: there are two guards to each end, and one cell of its twin."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        scenario = draw_ends(seed, FORKING)
        shape = replace(scenario.config.shape, lanes=2, replicas=1)
        outcome = simulate(
            replace(scenario, config=replace(scenario.config, shape=shape, guards=2))
        )
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["fork with guards"]


def test_a_wrong_copy_of_a_guard_is_void_with_the_next_vote_though_the_policy_is_off() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        outcome = simulate(draw_wrong_guards(seed, GUARDED))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["corrupt guard"]
    assert not seen["plan with a fork"]


def test_final_digests_of_a_course_before_a_fork_are_not_compared_with_those_after_it() -> None:
    for seed in (24, 40):
        outcome = simulate(draw_inner_ranks(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"


def test_an_inner_rank_that_is_lost_again_at_once_is_made_as_before() -> None:
    outcome = simulate(draw_inner_ranks(35, FORKING))
    assert not outcome.violation, outcome.violation


def test_what_pods_keep_comes_before_a_fork_and_counts_again_after_it() -> None:
    seen: Counter[str] = Counter()
    for seed in (0, 1, 2, 31, 34, 44):
        outcome = simulate(draw_forks_beside_snapshots(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["fork"]
    assert seen["replayed after a fork"]


def test_stores_that_fail_to_answer_once_are_asked_again_before_a_stage_is_made_anew() -> None:
    for seed in (1, 10):
        outcome = simulate(draw_mute_stores(seed, ()))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        assert min(outcome.seen["did not answer"], outcome.seen["replayed"]) > 0
        assert not outcome.seen["fork"]
    with applied(ASKED_ONCE):
        outcome = simulate(draw_mute_stores(1, ()))
    assert outcome.seen["fork"], "else the job is exact for another reason"


def test_what_pods_keep_comes_before_what_guards_have() -> None:
    seen: Counter[str] = Counter()
    for seed in (0, 3, 11):
        outcome = simulate(draw_guards_beside_snapshots(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["fork with guards"]
    assert seen["replayed after a fork"]


def test_a_run_that_loses_nothing_makes_the_forks_of_another_run() -> None:
    """It ends as the history says, with faults of its own, and restarts, as well."""
    seen: Counter[str] = Counter()
    for seed in (1, 5, 6):
        first = World(draw_forks(seed, FORKING))
        assert not first.run().violation
        for kinds in ((), ("kill-trainer", "kill-pod", "reset"), ("kill-stage",)):
            again = World(repeating(first, kinds))
            outcome = again.run()
            assert not outcome.violation, f"seed {seed} {kinds}: {outcome.violation}"
            assert {final.history for final in again.store.last.finals} == ends_of(first)
            seen.update(outcome.seen)
    assert seen["made anew"]
    assert seen["plan restart"]
    assert seen["told of a fork"]


def test_a_run_makes_the_forks_of_another_one_whose_ends_guards_had() -> None:
    """Also where the guards are new when a fork is due, as they were lost just before."""
    seen: Counter[str] = Counter()
    for seed in (9, 15, 16):
        first = World(draw_ends(seed, FORKING))
        assert not first.run().violation
        for kinds in ((), ("kill-trainer", "kill-stage")):
            again = World(repeating(first, kinds))
            outcome = again.run()
            assert not outcome.violation, f"seed {seed} {kinds}: {outcome.violation}"
            assert {final.history for final in again.store.last.finals} == ends_of(first)
            seen.update(outcome.seen)
    assert seen["fork with guards"]


def test_a_lost_stage_an_end_too_loads_a_checkpoint_of_its_own_alone() -> None:
    loaded: set[int] = set()
    for seed in (5, 10, 25, 28):
        world = World(draw_stale(seed, FORKING))
        outcome = world.run()
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        places = (place for fork in world.store.last.history for place in fork.made.positions)
        own = [p for p in places if any(s.version is not None for b in p.blocks for s in b.sources)]
        loaded |= {place.stage for place in own}
    assert {0, 1, 4} <= loaded


def test_a_checkpoint_that_is_too_old_at_a_version_nobody_had_told_of_is_loaded_by_all() -> None:
    """The newest commit died with those who had to tell of it, so an order counted a step less."""
    outcome = simulate(draw(721131, approximate=True))
    assert not outcome.violation, outcome.violation
    assert outcome.seen["fork without sources"]
    assert not outcome.seen["fork"]


def test_a_fork_behind_a_commit_that_all_took_with_them_is_judged_by_what_is_left() -> None:
    """All end as they apply a step, and spares go on from what stores keep of it."""
    outcome = simulate(draw(724713, approximate=True))

    assert not outcome.violation
    assert outcome.seen["fork"]


def test_a_fork_may_take_an_end_from_its_guard_and_other_stages_from_their_own_checkpoint() -> None:
    """One that follows loses the guard as well, and loads the end's own checkpoint, too."""
    outcome = simulate(draw(729309, approximate=True))

    assert not outcome.violation
    assert outcome.seen["fork"] == 2


@few_or_all(range(6), range(12))
def test_without_permission_no_stage_is_made_anew_whatever_is_lost(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(draw_forbidden(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["plan restart"]
    assert not seen["plan with a fork"]


def test_what_a_person_allows_ahead_of_losses_is_used_for_one_of_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(7):
        outcome = simulate(draw_ahead(seed, FORKING))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    for seed in range(3):
        outcome = simulate(draw(seed, FORKING, approximate=False, ahead=True))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["permission used"]
    assert seen["permission withdrawn"]
    assert seen["made anew"]
    assert seen["plan restart"]


def test_what_is_lost_in_a_boundary_replay_enlarges_a_stretch_or_begins_it_again() -> None:
    seen: Counter[str] = Counter()
    for seed in (0, 1, 3, 6, 8, 16, 32):
        outcome = simulate(draw_cascades(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["stretch enlarged"]
    assert seen["stretch again"]
    assert seen["stretch beside another loss"]


def test_a_replay_by_gradients_goes_on_when_something_else_is_lost() -> None:
    num_gone_on = 0
    for seed in (1, 7):
        outcome = simulate(draw_further_losses(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        num_gone_on += outcome.seen["replay gone on with"]
    assert num_gone_on > 3


def test_what_a_window_needs_stays_where_stores_are_too_small_for_two() -> None:
    num_evicted = 0
    for seed in (8, 19, 20, 23):
        outcome = simulate(draw_short(seed, ()))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        num_evicted += outcome.seen["evicted"]
    assert num_evicted > 40


def test_nobody_promises_what_a_store_let_go_for_an_older_copy_that_was_damaged_unseen() -> None:
    losses = (
        Fault(kind="damage-segment", point="votes-gathered", times=4),
        Fault(kind="node-loss", point="SNAPSHOT", times=2),
        Fault(kind="kill-stage", point="vote-posted", times=6),
        Fault(kind="node-loss", point="settle-posted", times=1),
    )
    scenario = draw_short(208, ())
    config = replace(scenario.config, spares=2)
    outcome = simulate(replace(scenario, config=config, faults=losses))
    assert not outcome.violation, outcome.violation


def test_boundary_logs_of_a_refused_attempt_are_not_replayed() -> None:
    for seed in range(2):
        outcome = simulate(draw_refusals(seed))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        assert outcome.seen["replayed"]


def test_a_cell_of_which_a_rank_is_lost_computes_again_as_a_whole() -> None:
    replayed = 0
    for seed in range(6):
        outcome = simulate(draw_cells(seed, LOSSES_OF_CELLS))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        replayed += outcome.seen.get("replayed", 0)  # some end with nothing lost but a rank
    assert replayed > 10


@few_or_all(range(5), range(10))
def test_what_a_check_finds_late_never_counts_whoever_dies_before_the_vote(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        for draws, kinds in (
            (draw_wrong_types, INTERRUPTIONS),
            (draw_broken_chains, ("break-chain",)),
        ):
            outcome = simulate(draws(seed, kinds))
            assert not outcome.violation, f"seed {seed}: {outcome.violation}"
            seen.update(outcome.seen)
    assert seen["settle with wrong types"]


@few_or_all(range(1, 6), range(1, 11))
@pytest.mark.parametrize(
    ("kind", "verdict"), [("corrupt-unseen", "transient"), ("stick", "deterministic")]
)
def test_what_no_check_of_a_device_sees_is_found_by_its_witness(
    kind: str, verdict: str, seeds: range
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:  # in 0 whole pods are silent time and again: 9 to 37 plans
        outcome = simulate(draw(seed, kinds=(kind,)))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen[f"named {verdict}"]


def test_guards_of_tainted_steps_copy_anew_in_a_swapped_pipeline_that_goes_back() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        outcome = simulate(draw_tainted_guards(seed, ("reset", "kill-meeting")))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert min(seen["went back"], seen["guards connected"], seen["named deterministic"]) > 0


@few_or_all(range(40, 52), range(30, 52))
def test_a_disagreement_outlives_whoever_is_lost_before_it_is_ruled_on(seeds: range) -> None:
    """With two replicas, too: another device is asked, or waited for."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        scenario = draw(seed, kinds=WITNESSED)
        outcome = simulate(scenario)
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        few = scenario.config.shape.lanes == MIN_CHAINS
        seen["two replicas, named"] += few and bool(outcome.seen.get("named deterministic"))
        seen["lost, named"] += len(scenario.faults) > 1 and any("named" in s for s in outcome.seen)
    assert min(seen.values()) > 0, seen


def test_a_named_device_leaves_and_its_steps_are_told_whatever_the_store_forgets() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        outcome = simulate(draw_lost_stores(seed, BESIDE))
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        seen.update(outcome.seen)
    assert seen["named at the end"] > 2
    assert seen["plan restored"]


@few_or_all(range(7), range(14))
def test_one_of_two_replicas_that_is_hit_once_and_lost_leaves_a_word_that_counts(
    seeds: range,
) -> None:
    """The one that lives says the same as that word when it is asked again, or a third decides."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(draw_lost_words(seed, ("kill-pod", "node-loss")))
        outcome = world.run()
        assert not outcome.violation, f"seed {seed}: {outcome.violation}"
        asked = [plan for plan in world.checks.plans if "computed a type" in plan.reason]
        seen["asked a third"] += bool(asked)
        seen["went on"] += len(outcome.faults) > 1 and not asked
    assert min(seen["asked a third"], seen["went on"]) > 1, seen


def test_a_seed_without_snapshots_is_what_it_was_before_there_were_any() -> None:
    others = tuple(kind for kind in KINDS if kind not in IN_MEMORY)
    for seed in range(30):
        scenario = draw(seed)
        if scenario.config.snapshots is None:
            assert scenario == draw(seed, kinds=others)


def test_a_run_is_a_function_of_its_seed() -> None:
    one, other = (simulate(draw(7), tracing=True) for _ in range(2))
    assert one == other
    assert one.trace


def test_a_thread_that_never_begins_is_closed() -> None:
    async def thread() -> None: ...

    engine = Engine(0)
    process, other = (Process(engine, name, "node") for name in "ab")
    killed, left = thread(), thread()
    process.spawn(killed)
    other.spawn(left)
    process.kill()
    assert getcoroutinestate(killed) == "CORO_CLOSED"
    assert getcoroutinestate(left) == "CORO_CREATED"
    engine.close_unbegun()
    assert getcoroutinestate(left) == "CORO_CLOSED"


def test_a_run_leaves_no_thread_that_never_began() -> None:
    for seed in range(8):
        world = World(draw(seed, kinds=("kill-api",)))
        world.run()
        assert not world.engine.unbegun, f"seed {seed}"


STORMS = {
    "boundary-log-of-another-attempt",
    "cell-not-whole",
    "end-tells-no-course",
    "never-escalates",
    "old-vote-let-in",
}
"""Mutants with which a job never comes to an end: a simulated storm of plans takes seconds."""


def is_for_chaos(name: str) -> bool:
    return ALL_MUTANTS[name].is_rare or name in STORMS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.chaos] if is_for_chaos(name) else [])
        for name in sorted(ALL_MUTANTS)
    ],
)
def test_the_simulation_finds(name: str) -> None:
    mutant = ALL_MUTANTS[name]
    assert find(mutant) is not None, f"{mutant.why}: not found in {mutant.seeds} seeds"
