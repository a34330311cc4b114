"""Trainers in a quorum: the steps of a disturbed run have the bits of the undisturbed one's."""

import shutil

import pytest
from tests.train.quorum import kill_at, make_config, run_job

from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.plan import Method


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The job without failures, by its compute type."""
    known = {}

    def run(crew, dtype="float32"):
        if dtype not in known:
            directory = tmp_path_factory.mktemp("run")
            known[dtype] = run_job(crew, directory, make_config(dtype=dtype))
        return known[dtype]

    return run


def assert_same(run, reference):
    for what in ("masters", "gradient"):
        assert run.summed(what) == reference.summed(what)
    assert run.certificates() == reference.certificates()
    assert run.totals() == reference.totals()


def test_a_job_of_one_stage_and_one_replica_has_the_same_bits(crew, tmp_path, undisturbed):
    reference = undisturbed(crew)
    assert len(reference.summed("masters")) == len(set(reference.summed("masters"))) == 5
    run = run_job(crew, tmp_path, make_config(stages=1))
    assert_same(run, reference)
    assert run.summed("masters")[-1] == run.totals()["masters"]


@pytest.mark.parametrize(
    ("phase", "replica", "stage"),
    [
        ("FORWARD", 0, 0),
        pytest.param("BACKWARD_WEIGHT", 1, 1, marks=pytest.mark.chaos),
        ("REDUCE", 0, 1),
        pytest.param("VOTE", 1, 0, marks=pytest.mark.chaos),
        pytest.param("APPLY", 0, 0, marks=pytest.mark.chaos),
    ],
)
def test_a_cell_dies_a_spare_joins_and_no_bit_changes(
    crew, tmp_path, undisturbed, phase, replica, stage
):
    faults = [kill_at(1, phase, replica, stage)]
    run = run_job(crew, tmp_path, make_config(faults=faults), spares=1)
    assert_same(run, undisturbed(crew))
    assert run.fired == [faults[0].id]
    assert [plan.method for plan in run.plans] == [Method.START, Method.MASK, Method.JOIN]
    # The survivors lose no step: all settle the mask where the failure left them.
    masked = {f.step for f in run.facts if f.kind is FactKind.SETTLED and f.quorum.id == 2}
    assert masked == {2 if phase == "APPLY" else 1}


def test_one_stage_without_a_spare_goes_on_with_one_replica(crew, tmp_path, undisturbed):
    run = run_job(crew, tmp_path, make_config(stages=1, faults=[kill_at(2, "VOTE", 1, 0)]))
    assert_same(run, undisturbed(crew))
    assert len(run.plans[-1].members) == 1


def test_bf16_with_recompute_and_a_kill_equals_bf16_without(crew, tmp_path, undisturbed):
    faults = [kill_at(1, "BACKWARD_INPUT", 0, 1)]
    config = make_config(dtype="bfloat16", recompute=True, faults=faults)
    run = run_job(crew, tmp_path, config, spares=1)
    reference = undisturbed(crew, "bfloat16")
    assert_same(run, reference)
    assert reference.summed("masters") != undisturbed(crew).summed("masters")


def test_checkpoints_are_written_without_changing_a_bit(crew, tmp_path, undisturbed):
    store = tmp_path / "checkpoints"
    run = run_job(crew, tmp_path, make_config(checkpoints=store))
    assert_same(run, undisturbed(crew))
    older, last = sorted(path.name for path in store.glob("step-*"))
    assert last == "step-00000005", "the last step's is complete before the job ends"
    shutil.rmtree(store / last)
    again = tmp_path / "again"
    again.mkdir()
    resumed = run_job(crew, again, make_config(stages=1, checkpoints=store))
    version = int(older.removeprefix("step-"))
    assert resumed.summed("masters") == undisturbed(crew).summed("masters")[version:]
    assert resumed.totals() == run.totals()
