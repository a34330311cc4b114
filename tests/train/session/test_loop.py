"""A user's own loop in a quorum: interrupted anywhere, with the bits of the undisturbed run."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.quorum import kill_at, make_config, run_job

import mainstay_train
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.settings import Mode
from mainstay_core.wire.plan import Method
from mainstay_train.model import workload

LOOPS = Path(__file__).parents[1] / "loops.py"


def loop_config(name="train", *, stages=1, config=(), **options):
    return dataclasses.replace(
        make_config(stages=stages, **options),
        entrypoint=f"{LOOPS}:{name}",
        workload=dict(config),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The job without failures, on two replicas, by its entrypoint."""
    known = {}

    def run(crew, name="train"):
        if name not in known:
            known[name] = run_job(crew, tmp_path_factory.mktemp("run"), loop_config(name))
        return known[name]

    return run


def assert_same(run, reference):
    for what in ("masters", "gradient"):
        assert run.summed(what) == reference.summed(what)
    assert run.certificates() == reference.certificates()
    assert run.totals() == reference.totals()


@pytest.mark.parametrize("name", ["train", "train_in_bf16"])
def test_steps_change_the_model_and_learn(crew, undisturbed, name):
    run = undisturbed(crew, name)
    assert len(set(run.summed("masters"))) == 5
    losses = [loss for loss, *_ in run.certificates()]
    assert len(set(losses)) == 5
    assert len({data for *_, data in run.certificates()}) == 5
    if name == "train":
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("phase", ["FORWARD", "BACKWARD_INPUT", "REDUCE", "VOTE", "APPLY"])
def test_a_replica_dies_a_spare_joins_and_no_bit_changes(crew, tmp_path, undisturbed, phase):
    run = run_job(crew, tmp_path, loop_config(faults=[kill_at(1, phase, 1, 0)]), spares=1)
    assert_same(run, undisturbed(crew))
    assert [plan.method for plan in run.plans] == [Method.START, Method.MASK, Method.JOIN]


def test_bf16_goes_on_alone_with_the_same_bits(crew, tmp_path, undisturbed):
    config = loop_config("train_in_bf16", faults=[kill_at(2, "BACKWARD_WEIGHT", 0, 0)])
    run = run_job(crew, tmp_path, config)
    assert_same(run, undisturbed(crew, "train_in_bf16"))
    assert len(run.plans[-1].members) == 1


def test_works_that_are_computed_twice_leave_the_bits_as_they_are(crew, tmp_path, undisturbed):
    config = loop_config(faults=[kill_at(1, "BACKWARD_WEIGHT", 1, 0)])
    run = run_job(crew, tmp_path, dataclasses.replace(config, dmr=Mode.FULL), spares=1)
    assert_same(run, undisturbed(crew))


def test_checkpoints_hold_what_the_loop_needs(crew, tmp_path, undisturbed):
    store = tmp_path / "checkpoints"
    assert_same(run_job(crew, tmp_path, loop_config(checkpoints=store)), undisturbed(crew))
    shutil.rmtree(store / "step-00000005")  # the end's: what is left is in mid-job
    again = tmp_path / "again"
    again.mkdir()
    resumed = run_job(crew, again, loop_config(checkpoints=store))
    assert 0 < len(resumed.entries) < 5
    assert resumed.totals() == undisturbed(crew).totals()


MISTAKES = [
    (
        "commits_early",
        r"commit of step 0 with 3 micro-batches left: go through all of step\.work\(\)",
    ),
    ("skips_done", r"work of step 0, type 0, micro-batch 0 is not done: call work\.done"),
    ("skips_backward", r"no gradient in the work of step 0, .*: call loss\.backward\(\)"),
    ("skips_commit", r"step 0 was not committed: call step\.commit\(\)"),
    ("goes_back_twice", r"backward ran twice in the work of step 0.*call backward once"),
    ("goes_back_twice_through_one_graph", "backward through the graph a second time"),
    ("is_done_twice", r"is not at hand: call done\(\) once"),
    ("works_after_commit", "step 0 is committed: it has no more work"),
    ("commits_twice", "step 0 is committed already"),
    ("leaves_early", r"left in step 0 of 5: go on until session\.steps\(\) ends"),
    ("never_begins", r"without going through session\.steps\(\)"),
    ("registers_nothing", r"session\.steps\(\) before session\.register"),
    ("registers_twice", "called twice: a session trains one model"),
    ("uses_half_of_the_model", r"'extra\.weight' and 1 more got no gradient.*allow_unused=True"),
    ("steps_an_optimizer", r"'bias' and 3 more was changed .*no optimizer\.step\(\)"),
    ("keeps_statistics", r"BatchNorm1d \('1'\), whose statistics depend on the order"),
    ("takes_no_mean", r"must be one number, a sum over tokens; got a tensor of shape \(8, 256\)"),
    ("has_no_data", r"need a data set: session\.register\(\.\.\., data=\.\.\.\)"),
    ("counts_in_fractions", "tokens of the work .* must be a whole number from 0, got 0.5"),
    ("has_an_optimizer_that_cannot_be_healed", "building the optimizer: .*LBFGS"),
    ("raises", "the loop .*: ValueError: the user's own words"),
    ("has_a_typing_error", "NameError: name 'seesion' is not defined"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[name for name, _ in MISTAKES])
def test_a_mistake_in_the_loop_fails_the_job_and_says_what_is_wrong(
    crew, tmp_path, mistake, message
):
    config = loop_config("mistaken", lanes=1, config={"mistake": mistake})
    with pytest.raises(AssertionError, match=message):
        run_job(crew, tmp_path, config)


def test_a_loop_has_one_stage(crew, tmp_path):
    with pytest.raises(AssertionError, match=r"spec\.parallelism\.stages: is 2, but an own loop"):
        run_job(crew, tmp_path, loop_config(stages=2, lanes=1))


def test_a_loop_is_found_where_it_is_marked():
    assert workload.find(f"{LOOPS}:train") is not None
    with pytest.raises(InvalidSpecError, match="is an own loop, not a workload of blocks"):
        workload.load(f"{LOOPS}:train")
    with pytest.raises(InvalidSpecError, match=r"mark it with @mainstay_train\.loop"):
        workload.load(f"{LOOPS}:leaves_early")


def test_importing_the_package_does_not_import_torch():
    script = "import sys, mainstay_train; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_package_names_what_a_loop_needs():
    assert {"loop", "LoopSession", "Step", "Work"} <= set(mainstay_train.__all__)
    assert all(getattr(mainstay_train, name).__doc__ for name in mainstay_train.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Lopp'"):
        _ = mainstay_train.Lopp
