"""A second replica computes a shard type, too: real trainers, one of which has a wrong device.

What is wrong is put in where a stage sends its output on, so no execution of the device shows it.
"""

import asyncio
import dataclasses

import pytest
from tests.train.quorum import make_config, run_job
from tests.worlds.supervisors import PlayedSupervisors

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict

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


def test_a_device_that_is_always_wrong_insists_and_nobody_else_is_named(crew, tmp_path):
    world = PlayedSupervisors(crew, tmp_path, watching(), halts={first_of(1): ["wrong-sends"]})
    play(world)
    assert {name for name, _ in world.findings} == {first_of(1)}
    assert {finding.verdict for _, finding in world.findings} == {Verdict.DETERMINISTIC}
    assert all(finding.rank.stage == 0 for _, finding in world.findings)
