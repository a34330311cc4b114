"""Whole steps of a stage on a device: equal bits each time, and one wait before the vote."""

import contextlib
import threading

import pytest
import torch
from tests.train.checks.step import Step
from tests.train.compute.test_engine import (
    SLOT,
    TYPES,
    Neighbours,
    apply,
    make_engine,
    run_step,
    table_of,
)

from mainstay_core.dmr.settings import Mode
from mainstay_train.kernels import bits


@contextlib.contextmanager
def without_waits():
    """What waits for the device is an error, but for events that are waited for on purpose."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def told(engine):
    return [bits.digest_of([flat.tensor]) for flat in engine.state.everything()]


@pytest.mark.parametrize("recompute", [0.0, 1.0])
@pytest.mark.parametrize("model", ["llama", "llama bf16", "llama dropout", "moe", "moe bf16"])
def test_a_step_of_a_built_in_model_repeats_its_bits(device, model, recompute):
    step = Step(model, recompute=recompute, device=str(device))
    first = step.run(Mode.OFF)
    kept = torch.empty(12_345, device=device)
    again = step.run(Mode.OFF)
    other = Step(model, recompute=recompute, device=str(device)).run(Mode.OFF)
    assert again.digests == first.digests
    assert other.digests == first.digests
    assert len(kept) == 12_345


@pytest.mark.parametrize("model", ["llama bf16", "moe"])
def test_recompute_moves_no_bit(device, model):
    steps = (Step(model, recompute=share, device=str(device)) for share in (0.0, 0.5, 1.0))
    assert len({step.run(Mode.OFF).digests for step in steps}) == 1


@pytest.mark.parametrize("model", ["llama", "moe bf16"])
def test_two_stages_on_one_device(device, model):
    first, second = (
        Step(model, recompute=0.0, stages=2, device=str(device)).run(Mode.OFF) for _ in "ab"
    )
    assert first.digests == second.digests


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("stage", "num_stages"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_no_step_waits_for_the_device_but_for_what_the_vote_tells(
    needs_cuda, stage, num_stages, recompute
):
    chain = Neighbours() if num_stages > 1 else None
    group = Neighbours()
    engine = make_engine(needs_cuda, stage, num_stages, recompute=recompute)
    run_step(engine, 0, chain=chain, group=group)  # what is made once is made
    for number in (1, 2):
        with without_waits():
            engine.compute(TYPES, number, chain)
            table = table_of(engine)
            engine.reduce(group, table, [0, 1], 0)
            engine.ballot(group, table, 0, SLOT, "")
            apply(engine, number)
        engine.drop_held()


def test_the_host_runs_ahead_of_the_device(needs_cuda):
    """While the device is busy with something else, a whole type's work is given to it."""
    engine = make_engine(needs_cuda)
    run_step(engine, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    still = torch.cuda.Event()
    still.record()
    engine.compute(TYPES[:1], 1, None)  # more would not go into the device's queue of kernels
    assert not still.query(), "the device has not begun with it"
    engine.judge_held()
    torch.cuda.synchronize()
    assert len(engine.store.held()) == 1


def test_several_steps_in_two_engines_end_alike(device):
    ends = []
    for _ in range(2):
        engine = make_engine(device)
        votes = [run_step(engine, number) for number in range(3)]
        ends.append((votes, told(engine), engine.state.masters_digest()))
    assert ends[0] == ends[1]


def test_a_step_beside_a_thread_that_copies_the_state(device):
    """As a checkpoint or a heal does; the bits of the step do not change."""
    quiet, beside = make_engine(device), make_engine(device)
    expected = [run_step(quiet, number) for number in range(3)]
    over, read = threading.Event(), []

    def copy():
        while not over.is_set():
            read.append([flat.tensor.cpu() for flat in beside.state.flats()])

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        found = [run_step(beside, number) for number in range(3)]
    finally:
        over.set()
        thread.join()
    assert found == expected
    assert told(beside) == told(quiet)
    assert read


def test_the_pieces_of_a_step_are_near_those_of_the_host(device):
    here, there = make_engine(), make_engine(device)
    (mine, _, _), (theirs, _, _) = run_step(here, 0), run_step(there, 0)
    assert [s.tokens for s in mine.stats] == [s.tokens for s in theirs.stats]
    assert [s.data for s in mine.stats] == [s.data for s in theirs.stats]
    for one, other in zip(mine.stats, theirs.stats, strict=True):
        assert other.loss_sum == pytest.approx(one.loss_sum, rel=1e-4)
    assert theirs.norms_sq == pytest.approx(mine.norms_sq, rel=1e-3)
