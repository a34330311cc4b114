"""The checklist of the protocol (docs/protocol.md section 13) on real trainers, halted and killed
between any two of their instructions: every run has the digests of the undisturbed one.
"""

import asyncio
import dataclasses
import itertools

import pytest
from tests.train.points import HEAL_POINTS, SETTLE_POINTS, STEP_POINTS
from tests.train.quorum import make_config, run_job
from tests.worlds.supervisors import PlayedSupervisors

from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method

STEP = 2
"""Where things happen."""
QUICK_DEATHS = {("joiner", "heal-received"), ("source", "heal-asking"), ("source", "healed")}
"""Who dies when in mid-heal in `make test`; all others do in `make chaos`."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Outcomes of jobs without failures, by lanes and steps; stages and spares change no bit."""
    known = {}

    def run(crew, lanes=2, steps=5):
        if (lanes, steps) not in known:
            directory = tmp_path_factory.mktemp("run")
            known[lanes, steps] = run_job(crew, directory, make_config(lanes=lanes, steps=steps))
        return known[lanes, steps]

    return run


def assert_same(run, reference):
    for what in ("masters", "gradient"):
        assert run.summed(what) == reference.summed(what)
    assert run.certificates() == reference.certificates()
    assert run.totals() == reference.totals()


def play(world, scenario):
    return asyncio.run(world.run(scenario))


@pytest.mark.parametrize("point", STEP_POINTS)
@pytest.mark.parametrize("victim", ["life0", pytest.param("life3", marks=pytest.mark.chaos)])
def test_a_kill_between_any_two_instructions(crew, tmp_path, undisturbed, point, victim):
    at = f"{point}@{STEP}"
    world = PlayedSupervisors(crew, tmp_path, make_config(), halts={victim: [at]})

    async def scenario(world):
        world.kill(await world.at(victim, at))

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    assert [plan.method for plan in run.plans] == [Method.START, Method.MASK]


@pytest.mark.parametrize(
    "more", [pytest.param(0, marks=pytest.mark.chaos), pytest.param(1, marks=pytest.mark.chaos), 5]
)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("computing", marks=pytest.mark.chaos),
        pytest.param("reduce-scattered", marks=pytest.mark.chaos),
        "vote-posted",
        pytest.param("vote-gathered", marks=pytest.mark.chaos),
    ],
)
def test_a_stopped_rank_that_goes_on_late_changes_nothing_and_heals(
    crew, tmp_path, undisturbed, point, more
):
    # With all votes in, the others commit the step, and begin the next, before it is missed.
    # When it is stopped just after its own, nobody can say whether that one has left it.
    begun = point in ("vote-posted", "vote-gathered")
    at, gate = f"{point}@{STEP}", f"computing@{STEP + more + 1 + begun}"
    config = make_config(steps=STEP + 10)
    world = PlayedSupervisors(crew, tmp_path, config, halts={"life3": [at], "life0": [gate]})

    async def scenario(world):
        late = await world.at("life3", at)
        world.stop(late)
        world.resume(late)  # it reads this once it is continued
        world.silence(late)
        if more == 0:
            await world.until(lambda: world.method is Method.MASK)
            world.proceed(late)
        first = await world.at("life0", gate)
        if more:
            world.proceed(late)
        world.hear(late)
        await world.until(lambda: world.method is Method.JOIN)
        world.resume(first)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, steps=STEP + 10))
    assert [plan.method for plan in run.plans] == [Method.START, Method.MASK, Method.JOIN]
    settled = [f for f in run.facts if f.kind is FactKind.SETTLED and f.quorum.id == 3]
    assert {f.pod for f in settled} == {"pod0", "pod1", "pod2", "pod3"}


@pytest.mark.parametrize("fate", ["lives", "dies", pytest.param("stops", marks=pytest.mark.chaos)])
@pytest.mark.parametrize("index", [0, pytest.param(3, marks=pytest.mark.chaos)])
def test_a_vote_that_completes_on_exactly_one_rank(crew, tmp_path, undisturbed, fate, index):
    config = make_config(steps=8)
    lucky = f"life{[0, 2, 1, 3][index]}"  # members are in the order of (stage, replica)
    gathered = f"vote-gathered@{STEP}"
    world = PlayedSupervisors(crew, tmp_path, config, halts={lucky: [gathered]})
    world.gather.cut_key, world.gather.cut_to = f"vote/{STEP}/0", index

    async def scenario(world):
        life = await world.at(lucky, gathered)
        if fate == "lives":
            world.resume(life)
        elif fate == "dies":
            world.kill(life)
        else:
            world.stop(life)
            world.resume(life)
            world.silence(life)
            await world.committed(STEP)
            world.proceed(life)
            world.hear(life)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, steps=8))
    settled = {f.step for f in run.facts if f.kind is FactKind.SETTLED and f.quorum.id == 2}
    assert settled == {STEP + 1 if fate == "lives" else STEP}


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ("life3", ("life0", "life2")),
        pytest.param("life2", ("life1", "life3"), marks=pytest.mark.chaos),
    ],
)
def test_one_stage_is_reduced_and_the_other_is_not(crew, tmp_path, undisturbed, slow, fast):
    posted, posting = f"vote-posted@{STEP}", f"reduce-posting@{STEP}"
    halts = {slow: [posting], **{name: [posted] for name in fast}}

    async def scenario(world):
        victim = await world.at(slow, posting)
        reduced = [await world.at(name, posted) for name in fast]
        world.kill(victim)
        for life in reduced:
            world.resume(life)

    run = play(PlayedSupervisors(crew, tmp_path, make_config(), halts=halts), scenario)
    assert_same(run, undisturbed(crew))


@pytest.mark.parametrize("point", SETTLE_POINTS)
@pytest.mark.parametrize("second", ["life2", pytest.param("life5", marks=pytest.mark.chaos)])
def test_a_kill_during_settle_at_each_report(crew, tmp_path, undisturbed, point, second):
    at, settling = f"reduce-posting@{STEP}", f"{point}@q2"
    halts = {"life1": [at], second: [settling]}

    async def scenario(world):
        world.kill(await world.at("life1", at))
        world.kill(await world.at(second, settling))

    run = play(PlayedSupervisors(crew, tmp_path, make_config(lanes=3), halts=halts), scenario)
    assert_same(run, undisturbed(crew, lanes=3))


@pytest.mark.parametrize(
    ("lanes", "victims"),
    [(2, ("life0", "life3")), (3, ("life2", "life3", "life4", "life5")), (3, ("life1", "life2"))],
    ids=["remains-are-mated", "all-but-one-replica", "two-of-three-broken"],
)
@pytest.mark.parametrize(
    "point", [pytest.param("computed", marks=pytest.mark.chaos), "vote-posted"]
)
def test_several_at_once_without_a_spare(crew, tmp_path, undisturbed, lanes, victims, point):
    at = f"{point}@{STEP}"
    world = PlayedSupervisors(
        crew, tmp_path, make_config(lanes=lanes), halts={name: [at] for name in victims}
    )

    async def scenario(world):
        world.kill(*[await world.at(name, at) for name in victims])

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, lanes=lanes))
    assert run.plans[1].method is Method.MASK
    settled = {f.step for f in run.facts if f.kind is FactKind.SETTLED and f.quorum.id == 2}
    # Who had posted all votes may have them all; before that nobody can have applied the step.
    assert settled in ([{STEP}, {STEP + 1}] if point == "vote-posted" else [{STEP}])


def test_a_type_that_the_neighbour_had_finished_is_patched_through_all_stages(
    crew, tmp_path, undisturbed
):
    computed, posting = f"computed@{STEP}", f"reduce-posting@{STEP}"
    halts = {"life0": [computed], "life1": [posting], "life2": [posting], "life3": [posting]}
    world = PlayedSupervisors(crew, tmp_path, make_config(), halts=halts)

    async def scenario(world):
        others = [await world.at(f"life{i}", posting) for i in (1, 2, 3)]
        world.kill(await world.at("life0", computed))
        for life in others:
            world.resume(life)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    for name in ("life2", "life3"):
        lists = [types for step, types in world.lives[name].computed if step == STEP]
        assert lists == [(2, 3), (0, 1)], "the intact replica computes what is lacking, no more"


def heal_config(**more):
    return make_config(lanes=3, steps=8, **more)


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        pytest.param(*death, marks=[] if death in QUICK_DEATHS else pytest.mark.chaos)
        for death in itertools.product(("joiner", "source", "third"), HEAL_POINTS)
    ],
)
def test_a_death_in_mid_heal(crew, tmp_path, undisturbed, victim, point):
    first, healing = f"reduce-posting@{STEP}", f"{point}@q3"
    halts = {"life3": [first], "life6": [healing]}
    world = PlayedSupervisors(crew, tmp_path, heal_config(), spares=2, halts=halts)

    async def scenario(world):
        world.kill(await world.at("life3", first))
        joiner = await world.at("life6", healing)
        before = world.state.step
        if victim == "joiner":
            world.kill(joiner)
        else:
            world.kill(world.life(0, 1) if victim == "source" else world.life(0, 0))
            world.resume(joiner)
        await world.until(lambda: world.plan.quorum.id > 3 and bool(world.state.settled_at_s))
        assert world.state.settled_step >= before, "the step number does not go back"

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, lanes=3, steps=8))


def test_a_joiner_votes_first_at_the_settled_step_and_supplies_first_at_the_next(
    crew, tmp_path, undisturbed
):
    at, gate = f"computing@{STEP}", f"computing@{STEP + 2}"
    halts = {"life3": [at], "life0": [gate]}
    world = PlayedSupervisors(crew, tmp_path, make_config(steps=8), spares=1, halts=halts)

    async def scenario(world):
        world.kill(await world.at("life3", at))
        first = await world.at("life0", gate)
        await world.until(lambda: world.method is Method.JOIN)
        world.resume(first)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, steps=8))
    joined = run.plans[2].quorum.id
    entered = {f.step for f in run.facts if f.kind is FactKind.SETTLED and f.quorum.id == joined}
    assert len(entered) == 1
    (step,) = entered
    computed = [done for done in world.lives["life4"].computed if done[1]]
    assert computed[0][0] == step + 1


def test_a_trainer_that_restarts_faster_than_anybody_notices_never_enters_the_old_quorum(
    crew, tmp_path, undisturbed
):
    at = f"reduce-posting@{STEP}"
    world = PlayedSupervisors(
        crew, tmp_path, make_config(steps=8), reserves=1, halts={"life3": [at]}
    )

    async def scenario(world):
        old = await world.at("life3", at)
        new = world.restart(old)
        await world.until(lambda: world.method is Method.MASK)
        assert world.plan.member_of(new.slot, new.name) is None
        old.dead = True
        old.worker.kill()

    run = play(world, scenario)
    assert_same(run, undisturbed(crew, steps=8))
    mine = [f.quorum.id for f in run.facts if f.incarnation == "life3b" and f.quorum]
    assert min(mine, default=3) >= 3


def test_a_spurious_reset_with_all_alive_excludes_nobody_and_recomputes_nothing(
    crew, tmp_path, undisturbed
):
    posting = f"reduce-posting@{STEP}"
    world = PlayedSupervisors(crew, tmp_path, make_config(), halts={"life2": [posting]})

    async def scenario(world):
        late = await world.at("life2", posting)
        await world.until(lambda: len(world.lives["life0"].computed) == STEP + 1)
        world.gather.cut(str(world.plan.quorum), 0)
        await world.until(lambda: world.method is Method.REFORM)
        world.resume(late)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    assert len(run.plans[-1].members) == 4
    for life in world.lives.values():
        assert len([types for step, types in life.computed if step == STEP and types]) == 1


def test_a_reset_of_the_reductions_sockets_excludes_nobody(crew, tmp_path, undisturbed):
    world = PlayedSupervisors(
        crew, tmp_path, make_config(), halts={"life2": [f"reset-stage@{STEP}"]}
    )

    async def scenario(world):
        await world.until(lambda: world.method is Method.REFORM)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    assert len(run.plans[-1].members) == 4
    for life in world.lives.values():
        assert len([types for step, types in life.computed if step == STEP and types]) == 1


@pytest.mark.parametrize(
    "point", [pytest.param("computing@0", marks=pytest.mark.chaos), f"vote-posting@{STEP}"]
)
def test_who_is_late_is_not_gone_whatever_the_timeouts(crew, tmp_path, undisturbed, point):
    config = dataclasses.replace(make_config(), connect_s=0.3, probe_s=0.01)
    world = PlayedSupervisors(crew, tmp_path, config, halts={"life3": [point]})

    async def scenario(world):
        late = await world.at("life3", point)
        await asyncio.sleep(1.0)  # what is tested is that time alone does nothing
        world.resume(late)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    assert [plan.method for plan in run.plans] == [Method.START]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("vote-posting", marks=pytest.mark.chaos),
        "vote-posted",
        pytest.param("vote-gathered", marks=pytest.mark.chaos),
    ],
)
def test_a_wrong_gradient_whose_rank_dies_before_at_and_after_its_vote(
    crew, tmp_path, undisturbed, point
):
    at = f"{point}@{STEP}"
    halts = {"life3": [f"corrupt-gradient@{STEP}", at]}

    async def scenario(world):
        world.kill(await world.at("life3", at))

    run = play(PlayedSupervisors(crew, tmp_path, make_config(), halts=halts), scenario)
    assert_same(run, undisturbed(crew))


def test_a_wrong_gradient_on_one_cell_is_reduced_again(crew, tmp_path, undisturbed):
    halts = {"life3": [f"corrupt-gradient@{STEP}"]}

    async def scenario(world):
        await world.committed(STEP)

    run = play(PlayedSupervisors(crew, tmp_path, make_config(), halts=halts), scenario)
    assert_same(run, undisturbed(crew))
    assert [plan.method for plan in run.plans] == [Method.START]


def test_a_type_found_wrong_before_the_vote_is_computed_again_and_nothing_else(
    crew, tmp_path, undisturbed
):
    world = PlayedSupervisors(
        crew, tmp_path, make_config(), halts={"life3": [f"wrong-type@{STEP}"]}
    )

    async def scenario(world):
        await world.committed(STEP)

    run = play(world, scenario)
    assert_same(run, undisturbed(crew))
    assert [plan.method for plan in run.plans] == [Method.START]
    lists = [
        len([types for step, types in life.computed if step == STEP and types])
        for life in world.lives.values()
    ]
    assert sorted(lists) == [1, 1, 2, 2], "both cells of one chain compute twice"


@pytest.mark.parametrize(
    "point", [pytest.param("reduce-posting", marks=pytest.mark.chaos), "vote-posted"]
)
def test_a_type_found_wrong_while_another_cell_dies_counts_in_no_settle(
    crew, tmp_path, undisturbed, point
):
    at = f"{point}@{STEP}"
    halts = {"life3": [f"wrong-type@{STEP}"], "life1": [at]}

    async def scenario(world):
        world.kill(await world.at("life1", at))

    run = play(PlayedSupervisors(crew, tmp_path, make_config(), halts=halts), scenario)
    assert_same(run, undisturbed(crew))


@pytest.mark.chaos
def test_the_ledger_gets_the_agreed_entry_where_its_writer_had_a_corrupt_state(
    crew, tmp_path, undisturbed
):
    world = PlayedSupervisors(
        crew,
        tmp_path,
        make_config(lanes=3, steps=8),
        halts={"life0": [f"corrupt-state@{STEP}"]},
    )

    async def scenario(world):
        await world.until(lambda: world.method is Method.REFORM)

    play(world, scenario)

    ((name, entry),) = world.corrected
    assert (name, entry.step, entry.stage) == ("life2", STEP, 0), "the next cell of its stage"
    assert entry.masters == undisturbed(crew, lanes=3, steps=8).entries[STEP, 0].masters


def test_a_corruption_in_the_optimizer_step_is_outvoted_and_healed(crew, tmp_path, undisturbed):
    halts = {"life5": [f"corrupt-state@{STEP}"]}

    async def scenario(world):
        await world.until(lambda: world.method is Method.REFORM)

    run = play(
        PlayedSupervisors(crew, tmp_path, make_config(lanes=3, steps=8), halts=halts), scenario
    )
    assert_same(run, undisturbed(crew, lanes=3, steps=8))
