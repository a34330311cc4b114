"""A cell whose reduction begins while it computes its last type."""

import threading

import pytest
import torch
from tests.train.compute.test_engine import (
    MICRO_BATCHES,
    SLOT,
    TYPES,
    Neighbours,
    make_engine,
    table_of,
)

from mainstay_core.planning.partials import covers, grow_all
from mainstay_core.planning.program import Op
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.steps.step_plan import Supply

STAGES = [(0, 1), (0, 3), (1, 3), (2, 3)]


class Cells(Neighbours):
    """The other cells of a stage answer with zeros; what is sent to them is kept.

    Those that are late do not answer.
    """

    def __init__(self, *, late=False):
        super().__init__()
        self.sent, self.ended, self._late = [], False, late
        self._changed = threading.Condition()

    def start_exchange(self, received, sent, received_sizes, sent_sizes):
        with self._changed:
            if self.ended:
                raise GroupEnded("the group has ended")
            self.sent.append(sent.clone())
            self._changed.notify_all()
        return super().start_exchange(received, sent, received_sizes, sent_sizes)

    def finish_exchange(self, exchange):
        del exchange
        with self._changed:
            self._changed.wait_for(lambda: self.ended or not self._late)
            if self.ended:
                raise GroupEnded("the group has ended")

    def wait_sent(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self.sent, 30)

    def shutdown(self, why):
        del why
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def abandon(self, exchanges):
        del exchanges
        self.shutdown("abandoned")


class Breaks(Neighbours):
    """A chain that ends before its nth type counts."""

    def __init__(self, left, before):
        super().__init__()
        self._left, self._before = left, before

    def mark(self, moment):
        if not self._left:
            self._before()
            raise GroupEnded("a cell is gone")
        self._left -= 1
        return super().mark(moment)


def build(stage, num_stages, *, recompute=False):
    engine = make_engine(
        stage=stage, num_stages=num_stages, recompute=recompute, layers=6, bucket_bytes=1
    )
    assert len(engine.reducer.bounds) > 1
    return engine


def early_for(types, group):
    table = [Supply(partial=partial, index=0) for partial in grow_all((), types, 2)]
    (last,) = (s.partial for s in table if covers(s.partial, types[-1]))
    return EarlyReduction(group=group, table=tuple(table), members=(0, 1), index=0, partial=last)


def run(engine, types, group, early, chain=None):
    engine.compute(types, 0, chain, early)
    table = table_of(engine)
    engine.reduce(group, table, (0, 1), 0)
    ballot = engine.ballot(group, table, 0, SLOT, "")
    held = {partial: flat.clone() for partial, flat in engine.store.partials.items()}
    return ballot, engine.sent, held


def same(found, expected):
    assert found[:2] == expected[:2]
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][p], expected[2][p]) for p in expected[2])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("stage", "num_stages"), STAGES)
@pytest.mark.parametrize("types", [TYPES, (2, 0, 1), (3,)])
def test_the_same_is_sent_earlier(stage, num_stages, recompute, types):
    chain = Neighbours() if num_stages > 1 else None
    late, early = Cells(), Cells()
    expected = run(build(stage, num_stages, recompute=recompute), types, late, None, chain)
    engine = build(stage, num_stages, recompute=recompute)
    last = (types[-1], MICRO_BATCHES - 1)
    seen = []

    def hook(action):
        if action.op is not Op.BACKWARD_WEIGHT:
            return
        if (action.type, action.micro_batch) != last:
            assert not early.sent
        elif stage == 0:
            early.wait_sent()  # no stage waits for this one's gradient
        seen.append(len(early.sent))

    engine.interpreter._hook = hook
    for _ in range(2):
        found = run(engine, types, early, early_for(types, early), chain)
        same(found, expected)
        engine.drop_held()
        assert len(early.sent) == len(late.sent)
        for ours, theirs in zip(early.sent, late.sent, strict=True):
            assert torch.equal(ours, theirs)
        early.sent.clear()
    if stage > 0:
        assert not any(seen), "the stage before waits for its gradient"


@pytest.mark.parametrize("completes", [0, 1, 2])
def test_a_chain_that_breaks_gives_up_what_was_begun(completes):
    engine, cells = build(0, 3), Cells(late=True)
    begins = completes == len(TYPES) - 1
    chain = Breaks(completes, cells.wait_sent if begins else lambda: None)
    with pytest.raises(GroupEnded, match="a cell is gone"):
        engine.compute(TYPES, 0, chain, early_for(TYPES, cells))
    assert engine._begun is None
    engine.judge_held()
    assert bool(cells.sent) == cells.ended == begins
    twin = build(0, 3)
    twin.compute(TYPES[:completes], 0, Neighbours())
    assert engine.store.held() == twin.store.held()
    for partial in twin.store.held():
        assert torch.equal(engine.store.partials[partial], twin.store.partials[partial])

    engine.compute(TYPES[completes:], 0, Neighbours())  # as a patch of the next quorum
    patched, table = Cells(), table_of(engine)
    engine.reduce(patched, table, (0, 1), 0)
    whole = build(0, 3)
    expected = run(whole, TYPES, Cells(), None, Neighbours())
    same((engine.ballot(patched, table, 0, SLOT, ""), engine.sent, engine.store.partials), expected)


@pytest.mark.parametrize(
    "instead",
    [
        lambda engine: engine.reduce(Cells(), table_of(engine), (0, 1), 0),
        lambda engine: engine.reduce(None, table_of(engine), (0,), 0),
        lambda engine: engine.judge_held(),
        lambda engine: engine.drop_held(),
        lambda engine: engine.compute((), 0, None),
    ],
)
def test_what_comes_instead_gives_up_what_was_begun(instead):
    engine, cells = build(0, 1), Cells()
    engine.compute(TYPES, 0, None, early_for(TYPES, cells))
    begun = engine._begun
    instead(engine)
    assert engine._begun is None
    assert begun._over.is_set()
    engine.drop_held()
    same(run(engine, TYPES, Cells(), None), run(build(0, 1), TYPES, Cells(), None))


def test_a_group_that_ended_meanwhile_fails_the_reduction_and_leaves_what_is_held():
    engine, cells = build(0, 1), Cells()
    cells.shutdown("a member is gone")
    engine.compute(TYPES, 0, None, early_for(TYPES, cells))
    table = table_of(engine)
    with pytest.raises(GroupEnded, match="the group has ended"):
        engine.reduce(cells, table, (0, 1), 0)
    same(run(engine, (), Cells(), None), run(build(0, 1), TYPES, Cells(), None))


def test_one_thread_serves_all_steps_of_an_engine_and_ends_with_it():
    def workers():
        return {thread for thread in threading.enumerate() if thread.name == "early reduction"}

    engine, before = build(0, 1), workers()
    run(engine, TYPES, Cells(), None)
    assert workers() == before
    for _ in range(2):
        engine.drop_held()
        cells = Cells()
        run(engine, TYPES, cells, early_for(TYPES, cells))
        (worker,) = workers() - before
    engine.close()
    worker.join(30)
    assert not worker.is_alive()


def test_one_bucket_begins_when_all_is_there():
    engine, cells = make_engine(), Cells()
    engine.compute(TYPES, 0, None, early_for(TYPES, cells))
    assert engine._begun is None
    assert not cells.sent
