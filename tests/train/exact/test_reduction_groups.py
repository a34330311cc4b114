"""Reductions over groups of the product, as trainers make them: gloo, and a backend as NCCL is.

What a reduction computes and in which order is shown by threads (:mod:`test_reduction`,
:mod:`test_early`). Here the exchanges are those of a real transport: it may complete them late, it
fails or ends them its own way when a reduction is given up, and it may write to what was given up.
"""

import threading

import pytest
import torch
from tests.train.crew import make_group
from tests.train.exact.test_early import LAST_FIRST, SMALL, begin, deliver, table_of
from tests.train.exact.test_reduction import LAYOUT, bits, filled, gradients, sum_by_rule_3

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.exact.reduction import Reducer

LANES, SHARDS_PER_LANE = 2, 3
WORK = [[0, 3, 1], [2, 5], [4]]
"""Types of each cell: two supply several partials, so that there are several turns."""
SEED = 7
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "strict"])


def connected(store, index, backend, name):
    group = make_group(store, index, len(WORK), name, backend=backend)
    group.connect()
    return group


def whole(reducer, group, index, store):
    """Whether the cells together come to the bits of rule 3."""
    table = table_of(WORK, SHARDS_PER_LANE)
    members = list(range(len(WORK)))
    reduced = reducer.reduce(group, table, members, index, store.partials)
    flats = gradients(LANES * SHARDS_PER_LANE, SEED)
    return torch.equal(bits(reduced), bits(sum_by_rule_3(flats, LANES, SHARDS_PER_LANE)))


def reduce_twice(pipe, at, index, backend):
    flats = gradients(LANES * SHARDS_PER_LANE, SEED)
    group = connected(at, index, backend, "stage")
    reducer = Reducer(LAYOUT, bucket_bytes=SMALL)
    store = filled(flats, WORK[index], SHARDS_PER_LANE)
    for _ in range(2):  # a second time in the same buffers, as after a refused vote
        pipe.send(whole(reducer, group, index, store))
    pipe.recv()


@BACKENDS
def test_the_bits_over_a_product_group_are_those_of_rule_3(crew, backend):
    workers = [crew.fork(reduce_twice, crew.store, i, backend) for i in range(len(WORK))]
    assert [[worker.hear() for _ in range(2)] for worker in workers] == [[True] * 2] * len(WORK)


def begin_and_give_up(pipe, at, index, backend):
    """All cells begin while they compute. The first leaves its last type in the middle."""
    flats = gradients(LANES * SHARDS_PER_LANE, SEED)
    group = connected(at, index, backend, "first quorum")
    start, started = group.start_exchange, threading.Event()

    def start_exchange(*args):
        exchange = start(*args)
        started.set()
        return exchange

    group.start_exchange = start_exchange
    reducer = Reducer(LAYOUT, bucket_bytes=SMALL)
    store, begun = begin(group, WORK, SHARDS_PER_LANE, index, flats, reducer)
    kept = {partial: flat.clone() for partial, flat in store.partials.items()}
    last = WORK[index][-1]

    def listen():
        group.shutdown(pipe.recv())  # the job's gather ends the groups of the others

    threading.Thread(target=listen, daemon=True).start()
    for block in list(LAST_FIRST)[: 1 if index == 0 else None]:
        deliver(store, flats, last, begun, block)
    if index == 0:
        started.wait()
        begun.give_up()
        pipe.send(group.ended)
    else:
        store.complete(last, joined=True)
        with pytest.raises(GroupEnded):
            begun.finish()
        pipe.send("ended")
    unspoilt = all(torch.equal(bits(store.partials[p]), bits(kept[p])) for p in kept)
    if index == 0:
        store.scratch.copy_(flats[last])
        store.complete(last)
    again = connected(at, index, backend, "second quorum")
    pipe.send((unspoilt or index > 0, whole(reducer, again, index, store)))
    pipe.recv()


@BACKENDS
def test_what_an_early_reduction_gave_up_spoils_nothing_and_the_next_quorum_reduces(crew, backend):
    workers = [crew.fork(begin_and_give_up, crew.store, i, backend) for i in range(len(WORK))]
    assert workers[0].hear() == "a reduction that had begun was given up"
    for worker in workers[1:]:
        worker.say("a member gave up")
    assert [worker.hear() for worker in workers[1:]] == ["ended"] * (len(WORK) - 1)
    assert [worker.hear() for worker in workers] == [(True, True)] * len(WORK)
