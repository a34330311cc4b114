"""A second replica computes a shard type, too: real trainers, one of which has a wrong device.

What is wrong is put in where a stage sends its output on, so no execution of the device shows it.
"""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from tests.train.quorum import make_config, run_job
from tests.worlds.supervisors import PlayedSupervisors

from mainstay_core.base.shape import Order
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict

LOOPS = Path(__file__).parent / "loops.py"
LANES, STEPS = 3, 4
STEP = 2
"""In which the chain of replica 2 is witnessed by that of replica 0."""


def watching(**fields):
    config = make_config(lanes=LANES, steps=STEPS)
    return dataclasses.replace(config, witness_every_steps=1, **fields)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The outcome of the job without a witness."""
    known = []

    def run(crew):
        if not known:
            config = make_config(lanes=LANES, steps=STEPS)
            known.append(run_job(crew, tmp_path_factory.mktemp("run"), config))
        return known[0]

    return run


def play(world):
    async def scenario(world):
        await world.committed(STEP)

    return asyncio.run(world.run(scenario))


def first_of(replica):
    """The life of a replica's first stage: lives are seated replica by replica."""
    return f"life{2 * replica}"


def assert_same(run, reference):
    for what in ("masters", "gradient"):
        assert run.summed(what) == reference.summed(what)
    assert run.certificates() == reference.certificates()


def test_a_witness_changes_no_bit_and_accuses_nobody(crew, tmp_path, undisturbed):
    world = PlayedSupervisors(crew, tmp_path, watching())
    assert_same(play(world), undisturbed(crew))
    assert world.findings == []


@pytest.mark.chaos
def test_checks_and_a_witness_of_a_swapped_pipeline_change_no_bit_and_accuse_nobody(crew, tmp_path):
    plain = make_config(lanes=LANES, steps=STEPS, order=Order.SWAPPED)
    checked = dataclasses.replace(plain, witness_every_steps=1, dmr=Mode.FULL)
    reference = run_job(crew, tmp_path, plain)
    world = PlayedSupervisors(crew, tmp_path, checked)
    assert_same(play(world), reference)
    assert all(life.compares == dict.fromkeys(range(STEPS), True) for life in world.lives.values())
    assert world.findings == []


@pytest.mark.parametrize("replica", [2, 0], ids=["witnessed", "witness"])
def test_a_device_that_is_wrong_once_is_outvoted_and_named(crew, tmp_path, undisturbed, replica):
    life = first_of(replica)
    points = [f"wrong-send@{STEP}"]
    if replica == 0:
        points = [f"wrong-witness@{STEP}"]
    world = PlayedSupervisors(crew, tmp_path, watching(), halts={life: points})
    assert_same(play(world), undisturbed(crew))
    ((name, finding),) = world.findings
    assert (name, finding.verdict, finding.step) == (life, Verdict.TRANSIENT, STEP)
    assert (finding.in_pass, finding.rank.stage) == (Pass.FORWARD, 0)


@pytest.mark.chaos
def test_a_loop_of_ones_own_is_witnessed_as_blocks_are(crew, tmp_path):
    config = dataclasses.replace(
        make_config(stages=1, lanes=LANES, steps=STEPS), entrypoint=f"{LOOPS}:train", workload={}
    )
    expected = run_job(crew, tmp_path, config)
    watched = dataclasses.replace(config, witness_every_steps=1)
    (tmp_path / "watched").mkdir()
    halts = {"life2": [f"wrong-gradient@{STEP}"]}
    world = PlayedSupervisors(crew, tmp_path / "watched", watched, halts=halts)

    assert_same(play(world), expected)

    ((name, finding),) = world.findings
    assert (name, finding.verdict) == ("life2", Verdict.DETERMINISTIC)
    assert finding.in_pass is Pass.WEIGHT


@pytest.mark.chaos
def test_checks_change_in_a_running_job_in_the_same_step_of_all_ranks(crew, tmp_path):
    steps = 9
    # Few exchanges: what is checked is slow enough.
    config = dataclasses.replace(make_config(lanes=LANES, steps=steps), bucket_bytes=1 << 20)
    expected = run_job(crew, tmp_path, config)
    (tmp_path / "changed").mkdir()
    on, off, wrong = "computing@1", "computing@6", first_of(2)
    halts = {first_of(0): [on, off], wrong: ["sticks@5"]}
    world = PlayedSupervisors(crew, tmp_path / "changed", config, halts=halts)

    async def change(world):
        halted = await world.at(first_of(0), on)
        world.submit(dmr=Mode.FULL, witness_every_steps=1)
        world.resume(halted)
        await world.at(first_of(0), off)
        world.submit(dmr=Mode.OFF, witness_every_steps=0)
        world.resume(halted)
        await world.committed(steps - 1)

    assert_same(asyncio.run(world.run(change)), expected)

    by_step = {step: set() for step in range(steps)}
    for life in world.lives.values():
        for step, compares in life.compares.items():
            by_step[step].add(compares)
    assert all(len(found) == 1 for found in by_step.values()), by_step
    assert (by_step[1], by_step[5]) == ({False}, {True})
    ((name, finding),) = world.findings
    assert (name, finding.verdict, finding.step) == (wrong, Verdict.DETERMINISTIC, 5)


def test_a_device_that_is_always_wrong_insists_and_nobody_else_is_named(crew, tmp_path):
    world = PlayedSupervisors(crew, tmp_path, watching(), halts={first_of(1): ["wrong-sends"]})
    play(world)
    assert {name for name, _ in world.findings} == {first_of(1)}
    assert {finding.verdict for _, finding in world.findings} == {Verdict.DETERMINISTIC}
    assert all(finding.rank.stage == 0 for _, finding in world.findings)
    assert first_of(1) not in {m.incarnation for m in world.plan.members}, "its work is handed over"


@pytest.mark.chaos
def test_a_job_goes_back_before_a_device_was_wrong_and_ends_as_if_it_never_was(crew, tmp_path):
    """It is wrong from step 3 on, was witnessed in step 1 last, and is named in step 4."""
    storage = tmp_path / "checkpoints"
    config = dataclasses.replace(
        make_config(lanes=LANES, steps=7, checkpoints=storage), witness_every_steps=1
    )
    expected = run_job(crew, tmp_path, make_config(lanes=LANES, steps=7))
    (tmp_path / "tainted").mkdir()
    world = PlayedSupervisors(
        crew,
        tmp_path / "tainted",
        dataclasses.replace(config, goes_back=True),
        halts={first_of(1): ["wrong-from@3"]},
    )

    outcome = play(world)

    assert_same(outcome, expected)
    assert outcome.totals() == expected.totals()
    # It is wrong again if the next step comes before the plan.
    assert {name for name, _ in world.findings} == {first_of(1)}
    finding = world.findings[0][1]
    assert (finding.verdict, finding.step, finding.since) == (Verdict.DETERMINISTIC, 4, 2)
    (taint,) = world.state.taints
    assert (taint.since, taint.counts) == (2, False)
    (voided,) = world.plan.voided
    assert voided.version == 2
    names = sorted(path.name for path in storage.iterdir() if path.name.startswith("step-"))
    assert "step-00000006" in names
    assert all(".tainted-" not in name or name >= "step-00000003" for name in names)


@pytest.mark.chaos
def test_a_disagreement_outlives_the_pod_that_found_it(crew, tmp_path, undisturbed):
    """The witness is lost as soon as all know that it differs: its word counts, and a third's."""
    witness = first_of(0)
    halts = {first_of(2): [f"sticks@{STEP}"], witness: [f"vote-gathered@{STEP}"]}
    world = PlayedSupervisors(crew, tmp_path, watching(), halts=halts)

    async def lose_the_witness(world):
        world.kill(await world.at(witness, f"vote-gathered@{STEP}"))
        await world.committed(STEP)

    assert_same(asyncio.run(world.run(lose_the_witness)), undisturbed(crew))
    ((name, finding),) = world.findings
    assert (name, finding.verdict) == (first_of(2), Verdict.DETERMINISTIC)
    assert (finding.in_pass, finding.rank.stage) == (Pass.FORWARD, 0)


@pytest.mark.chaos
@pytest.mark.parametrize("replica", [0, 1], ids=["witnessed", "witness"])
def test_of_two_replicas_a_spare_says_which_device_is_wrong(crew, tmp_path, replica):
    config = make_config(steps=STEPS)
    expected = run_job(crew, tmp_path, config)
    watched = dataclasses.replace(config, witness_every_steps=1)
    halts = {first_of(replica): [f"sticks@{STEP}"]}
    (tmp_path / "watched").mkdir()
    world = PlayedSupervisors(crew, tmp_path / "watched", watched, spares=1, halts=halts)

    assert_same(play(world), expected)

    ((name, finding),) = world.findings
    assert (name, finding.verdict) == (first_of(replica), Verdict.DETERMINISTIC)
    asked = [p for p in world.outcome.plans if "another trainer computes it" in p.reason]
    assert len(asked) == 1


@pytest.mark.chaos
def test_of_two_ranks_to_a_stage_the_one_that_gives_its_cell_something_wrong_is_named(
    crew, tmp_path
):
    config = make_config(stages=1, lanes=LANES, steps=2)
    config = dataclasses.replace(config, shape=dataclasses.replace(config.shape, ranks_per_stage=2))

    def run(name, halts, **fields):
        (tmp_path / name).mkdir()
        watched = dataclasses.replace(config, **fields)
        world = PlayedSupervisors(crew, tmp_path / name, watched, halts=halts)
        return asyncio.run(world.run(lambda world: world.committed(1))), world

    expected, _ = run("plain", {})
    outcome, world = run("watched", {"life3": ["wrong-gives"]}, witness_every_steps=1)

    assert_same(outcome, expected)
    assert {(name, finding.verdict) for name, finding in world.findings} == {
        ("life3", Verdict.DETERMINISTIC)
    }
