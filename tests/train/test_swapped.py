"""Trainers of a swapped pipeline in a quorum: kills change no bit."""

import shutil

import pytest
from tests.train.quorum import kill_at, make_config, run_job

from mainstay_core.base.shape import Order
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The job without failures, by its stages."""
    known = {}

    def run(crew, stages=2):
        if stages not in known:
            directory = tmp_path_factory.mktemp("run")
            known[stages] = run_job(
                crew, directory, make_config(order=Order.SWAPPED, stages=stages)
            )
        return known[stages]

    return run


def assert_same(run, reference):
    for what in ("masters", "gradient"):
        assert run.summed(what) == reference.summed(what)
    assert run.certificates() == reference.certificates()
    assert run.totals() == reference.totals()


@pytest.mark.parametrize(
    ("stages", "phase", "replica", "stage"),
    [
        (2, "SEND_F", 0, 1),
        (2, "BACKWARD_WEIGHT", 1, 0),
        *(
            pytest.param(stages, phase, replica, stage, marks=pytest.mark.chaos)
            for stages in (2, 4)
            for number, phase in enumerate(
                ("FORWARD", "RECV_F", "SEND_B", "BACKWARD_INPUT", "REDUCE", "VOTE", "APPLY")
            )
            for replica, stage in [(number % 2, number % stages)]
        ),
    ],
)
def test_a_cell_dies_a_spare_joins_and_no_bit_changes(
    crew, tmp_path, undisturbed, stages, phase, replica, stage
):
    faults = [kill_at(1, phase, replica, stage)]
    config = make_config(order=Order.SWAPPED, stages=stages, faults=faults)
    run = run_job(crew, tmp_path, config, spares=1)
    assert_same(run, undisturbed(crew, stages))
    assert run.fired == [faults[0].id]
    assert [plan.method for plan in run.plans] == [Method.START, Method.MASK, Method.JOIN]


def test_bits_are_others_than_in_order(crew, tmp_path, undisturbed):
    in_order = run_job(crew, tmp_path, make_config())
    swapped = undisturbed(crew)
    assert swapped.summed("masters")[0] != in_order.summed("masters")[0]
    data = [entry[-1] for entry in swapped.certificates()]
    assert data == [entry[-1] for entry in in_order.certificates()]


@pytest.mark.chaos
def test_a_checkpoint_is_gone_on_from_with_the_same_pipeline_alone(crew, tmp_path, undisturbed):
    store = tmp_path / "checkpoints"
    run = run_job(crew, tmp_path, make_config(order=Order.SWAPPED, checkpoints=store))
    assert_same(run, undisturbed(crew))
    _, last = sorted(path.name for path in store.glob("step-*"))
    shutil.rmtree(store / last)
    again = tmp_path / "again"
    again.mkdir()
    resumed = run_job(crew, again, make_config(order=Order.SWAPPED, checkpoints=store))
    assert resumed.totals() == run.totals()
    assert not [fact for fact in resumed.facts if fact.kind is FactKind.FAILED]
