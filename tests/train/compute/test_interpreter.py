import contextlib
import queue
import threading
import weakref

import pytest
import torch
from tests.train.crew import ADDRESS, make_group
from tests.train.stages import build_stage
from torch.distributed import TCPStore

from mainstay_core.base.digest import Digest
from mainstay_core.base.shape import Cut, Order
from mainstay_core.planning.program import ANSWER, Op, Receive, compile_compute
from mainstay_core.planning.receipts import receipts_of
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Pending
from mainstay_train.compute.interpreter import Interpreter
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.measure import LiveBytes
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.model import workload

SMALL = {"dim": 16, "layers": 3, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
SEED, MICRO_BATCHES, STEP = 5, 2, 3
TYPES = (0, 1, 3)
SHARDS_PER_LANE = 2
WITHIN_S = 60.0
"""A device does what it was given in less; on a CPU it has."""


class Pipe:
    """A chain's group in-process: queues between threads, one per (source, target, tag)."""

    def __init__(self, num_stages):
        del num_stages  # a queue is there once it is used
        self._lock = threading.Lock()
        self._queues = {}
        self._ended = False

    def end_of(self, stage, breaks_after=None):
        return Chain(self, PipeEnd(self, stage), breaks_after)

    def line(self, source, target, tag):
        with self._lock:
            line = self._queues.setdefault((source, target, tag), queue.SimpleQueue())
            if self._ended:
                line.put(None)
            return line

    def shutdown(self):
        """Everyone who waits for a message, or will, finds the end."""
        with self._lock:
            self._ended = True
            for line in self._queues.values():
                line.put(None)


class PipeEnd:
    """One stage's end of queues: sends never wait."""

    problem, tells_sent = "", True

    def __init__(self, pipe, stage):
        self._pipe, self._stage = pipe, stage

    def send(self, message):
        self._pipe.line(self._stage, message.peer, message.tag).put(message.tensor.clone())
        return Pending(Over(), message.tensor, None)

    def receive(self, message):
        return Pending(message, message.tensor, message.tensor)

    def send_and_receive(self, sent, received):
        return self.send(sent), self.receive(received)

    def finish(self, pending):
        if pending.into is None:
            return
        message = pending.work
        came = self._pipe.line(message.peer, self._stage, message.tag).get()
        if came is None:
            raise GroupEnded("the neighbour is gone")
        message.tensor.copy_(came)

    def wait_for(self, moment):
        moment.wait(WITHIN_S)

    def check(self):
        pass

    def shutdown(self, why):
        pass


class Over:
    """The work of a send that nobody waits for."""

    def is_completed(self):
        return True


class StrictPipe:
    """The product's groups in threads, over a transport without buffers."""

    def __init__(self, num_stages):
        self._store = TCPStore(ADDRESS, 0, None, True, wait_for_workers=False)
        at = f"{ADDRESS}:{self._store.port}"
        self._groups = [
            make_group(at, stage, num_stages, backend="strict") for stage in range(num_stages)
        ]
        in_threads(Group.connect, [(group,) for group in self._groups])

    def end_of(self, stage, breaks_after=None):
        return Chain(self, self._groups[stage], breaks_after)

    def shutdown(self):
        """The job's gather ends the groups of all ranks."""
        for group in self._groups:
            group.shutdown("the neighbour is gone")


class Chain:
    """One stage's groups; it breaks the pipe in place of its nth wait for a receive."""

    def __init__(self, pipe, group, breaks_after):
        self.pipeline, self._pipe, self._group, self._left = self, pipe, group, breaks_after
        self.send, self.receive = group.send, group.receive
        self.send_and_receive = group.send_and_receive
        self.tells_sent = group.tells_sent
        self._marks = ChainGroups("chain", group, None)
        self.mark, self.judge, self.check = self._marks.mark, self._marks.judge, self._marks.check
        self.broke = self._marks.broke

    def finish(self, pending):
        if self._left is not None and pending.into is not None:
            if self._left == 0:
                self._pipe.shutdown()
                raise GroupEnded("the neighbour is gone")
            self._left -= 1
        self._group.finish(pending)


class Stage:
    """One cell: its blocks, store and interpreter."""

    def __init__(
        self,
        stage,
        num_stages,
        *,
        recompute=False,
        dtype="float32",
        dataset=None,
        order=Order.IN_ORDER,
        hook=None,
        **config,
    ):
        self.stage, self.num_stages, self.order = stage, num_stages, order
        cut = Cut.BALANCED if order is Order.IN_ORDER else Cut.EQUAL
        model = workload.load("", {**SMALL, "dtype": dtype, **config})
        self.state = build_stage(model, num_stages, stage, cut)
        self.state.initialize(SEED)
        self.store = PartialStore(self.state.layout, SHARDS_PER_LANE)
        self.results = {}
        self.seen = []
        self.interpreter = Interpreter(
            workload=model,
            loader=Loader(dataset or model.dataset),
            blocks=self.state.blocks,
            stage=stage,
            num_stages=num_stages,
            seed=SEED,
            num_steps=STEP + 2,
            micro_batches=MICRO_BATCHES,
            store=self.store,
            results=self.results,
            recompute=recompute,
            hook=hook or self.seen.append,
            order=order,
        )

    def run(self, chain=None, types=TYPES, step=STEP):
        program = compile_compute(types, MICRO_BATCHES, self.stage, self.num_stages, self.order)
        self.interpreter.run(program, step, chain)
        return program


def run_chain(num_stages, kind=Pipe, **options):
    stages = [Stage(s, num_stages, **options) for s in range(num_stages)]
    if num_stages == 1:
        stages[0].run()
        return stages
    pipe = kind(num_stages)
    in_threads(Stage.run, [(stage, pipe.end_of(stage.stage)) for stage in stages])
    pipe.shutdown()
    return stages


def gradients(stages):
    """Bits of every partial, by parameter."""
    return {
        (partial, name): view.view(torch.int32).clone()
        for stage in stages
        for partial, flat in stage.store.partials.items()
        for name, view in stage.state.layout.views(flat).items()
    }


def stats(stages):
    """(loss, tokens, data) of each type, from whichever stage knows."""
    first, last = stages[0].results, stages[-1].results
    return {t: (last[t].loss_sum, last[t].tokens, first[t].data) for t in TYPES}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


class WatchedChain(Chain):
    """The groups of a stage; it knows which of the tensors that were sent are still there."""

    def __init__(self, group):
        super().__init__(None, group, None)
        self._sent = []
        self.send = lambda message: group.send(self._noted(message))
        self.send_and_receive = lambda sent, received: group.send_and_receive(
            self._noted(sent), received
        )

    def _noted(self, message):
        self._sent.append(weakref.ref(message.tensor))
        return message

    def num_kept(self):
        return sum(tensor() is not None for tensor in self._sent)


def _count_what_is_kept(pipe, store, rank, backend, order):
    group = make_group(store, rank, 2, backend=backend)
    group.connect()
    chain, counts = WatchedChain(group), []
    stage = Stage(rank, 2, order=order, hook=lambda _: counts.append(chain.num_kept()))
    stage.run(chain)
    pipe.send(counts)


def kept(stage, order):
    """The sends of a stage that have no receipt yet, before each of its actions."""
    receipts = receipts_of(TYPES, MICRO_BATCHES, stage, 2, order)
    left, counts = set(), []
    for action in compile_compute(TYPES, MICRO_BATCHES, stage, 2, order):
        counts.append(len(left))
        if action.op in ANSWER:
            left.add(action)
        flow = action.type, action.micro_batch, action.visit
        left -= {*receipts.get(Receive(action.op, *flow, action.peer), ())}
    return counts


@pytest.mark.parametrize("backend", ["gloo", "strict"])
@pytest.mark.parametrize("order", Order)
def test_what_was_sent_goes_when_the_neighbour_is_known_to_have_it(crew, backend, order):
    workers = [crew.fork(_count_what_is_kept, crew.store, rank, backend, order) for rank in (0, 1)]
    for stage, worker in enumerate(workers):
        real, expected = worker.hear(), kept(stage, order)
        if backend == "gloo":
            assert real == expected
        else:  # it says by itself that a send is over
            assert all(a <= b for a, b in zip(real, expected, strict=True))
        if order is Order.IN_ORDER:
            assert max(expected) <= 2, "of six micro-batches"


both = pytest.mark.parametrize("kind", [Pipe, StrictPipe])


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_same_bits_whatever_the_cut_and_the_recompute(dtype, kind):
    reference = run_chain(1, dtype=dtype)
    assert all(tensor.any() for tensor in gradients(reference).values())
    for num_stages in (2, 3, 5):
        chain = run_chain(num_stages, kind, dtype=dtype)
        assert equal(gradients(chain), gradients(reference))
        assert stats(chain) == stats(reference)
    for num_stages in (1, 2):
        chain = run_chain(num_stages, kind, dtype=dtype, recompute=True)
        assert equal(gradients(chain), gradients(reference))
        assert stats(chain) == stats(reference)


def peak(*, layers, recompute):
    """The most bytes of activations while a stage of all layers computes a type."""
    stage = Stage(0, 1, layers=layers, recompute=recompute)
    stage.run(types=TYPES[:1])  # what is made once is there
    stage.store.clear()
    with LiveBytes() as live:
        stage.run(types=TYPES[:1])
    return live.peak


def test_with_recompute_a_layer_more_costs_its_input_alone():
    activation = 4 * SMALL["sequence"] * SMALL["dim"]
    grown = peak(layers=9, recompute=True) - peak(layers=3, recompute=True)
    assert grown == 6 * activation
    assert peak(layers=9, recompute=False) - peak(layers=3, recompute=False) > 10 * grown


class Reader:
    """The stage behind this one: it answers at once, and has read what it was sent, or has not."""

    problem, tells_sent = "", True

    def __init__(self, *, has_read):
        self.pipeline, self._has_read = self, has_read

    def send(self, message):
        return Pending(self, message.tensor, None)

    def receive(self, message):
        return Pending(self, message.tensor.zero_(), message.tensor)

    def send_and_receive(self, sent, received):
        return self.send(sent), self.receive(received)

    def is_completed(self):
        return self._has_read

    def finish(self, pending):
        pass

    def mark(self, moment):
        del moment


def test_what_a_neighbour_has_taken_is_let_go_of():
    def most(*, has_read):
        stage, types = Stage(0, 2), tuple(range(6))
        stage.run(Reader(has_read=True), types[:1])  # what is made once is there
        stage.store.clear()
        with LiveBytes() as live:
            stage.run(Reader(has_read=has_read), types)
        return live.peak, len(types) * MICRO_BATCHES

    kept, num_flows = most(has_read=False)
    activation = 4 * SMALL["sequence"] * SMALL["dim"]
    # All that was sent, but what is under way in both cases.
    assert kept - most(has_read=True)[0] >= (num_flows - 2) * activation


def test_types_do_not_depend_on_each_other():
    together, alone = run_chain(1)[0], Stage(0, 1)
    alone.run(types=(3,))
    (partial,) = alone.store.held()
    assert torch.equal(alone.store.partials[partial], together.store.partials[partial])
    assert alone.results[3] == together.results[3]


@pytest.fixture(scope="module")
def undisturbed():
    return run_chain(2)


@both
@pytest.mark.parametrize("breaker", [0, 1])
@pytest.mark.parametrize("received", [0, 1, 2, 3, 5])
def test_an_interrupted_chain_keeps_whole_types_and_goes_on(undisturbed, breaker, received, kind):
    pipe = kind(2)
    stages = [Stage(0, 2), Stage(1, 2)]
    ends = [pipe.end_of(s, received if s == breaker else None) for s in range(2)]
    in_threads(until_broken, zip(stages, ends, strict=True))
    for stage in stages:
        done = types_held(stage)
        assert done == set(stage.results)
        if stage.stage == breaker:
            assert len(done) == received // MICRO_BATCHES
        left = [t for t in TYPES if t not in done]
        again, neighbour = kind(2), Stage(1 - stage.stage, 2)
        in_threads(Stage.run, [(x, again.end_of(x.stage), left) for x in (stage, neighbour)])
        assert equal(gradients([stage]), gradients([undisturbed[stage.stage]]))


def test_a_type_does_not_count_if_the_cell_was_aborted_while_it_was_computed():
    """Collectives of the cell that are aborted end without an error, with anything as result."""
    stage, pipe = Stage(0, 1), StrictPipe(2)
    chain = pipe.end_of(0)

    def abort_in_second_type(action):
        if action.op is Op.BACKWARD_INPUT and action.type == TYPES[1]:
            pipe.shutdown()

    stage.interpreter._hook = abort_in_second_type
    with pytest.raises(GroupEnded, match="the neighbour is gone"):
        stage.run(chain)

    assert types_held(stage) == set(stage.results) == {TYPES[0]}


def types_held(stage):
    return {t for p in stage.store.held() for t in range(p.first, p.last + 1)}


def in_threads(run, arguments):
    threads = [threading.Thread(target=run, args=args) for args in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def until_broken(stage, chain):
    with contextlib.suppress(GroupEnded):
        stage.run(chain)


class Watched:
    """A data set that notes who asks for what."""

    def __init__(self):
        self._dataset = workload.load("", SMALL).dataset
        self.calls, self.threads = [], set()

    def batch(self, address):
        self.calls.append((address.step, address.type, address.micro_batch))
        self.threads.add(threading.current_thread().name)
        return self._dataset.batch(address)


def test_batches_are_those_of_the_plan_whatever_was_loaded_ahead():
    """Behind a step the next one is expected to begin likewise; a plan may say otherwise."""
    watched = Watched()
    stage, twin = Stage(0, 1, dataset=watched), Stage(0, 1)
    stage.run(types=(0, 1))
    stage.run(types=(3,))  # a patch of the same step
    stage.run(types=(2, 5), step=STEP + 1)  # of another plan
    twin.run(types=(3,))
    twin.run(types=(2, 5), step=STEP + 1)
    for shard_type in (2, 3, 5):
        assert stage.results[shard_type] == twin.results[shard_type]
    flows = [(STEP, t, m) for t in (0, 1) for m in range(2)]
    flows += [(STEP, 3, 0), (STEP, 3, 1)]
    flows += [(STEP + 1, t, m) for t in (2, 5) for m in range(2)]
    # Beside these only what was expected to come next.
    assert [call for call in watched.calls if call in flows] == flows
    assert set(watched.calls) - {*flows} <= {(STEP + 1, 0, 0), (STEP + 1, 3, 0)}
    assert watched.threads == {"data"}


def test_nothing_is_loaded_beyond_the_last_step():
    watched = Watched()
    stage = Stage(0, 1, dataset=watched)
    stage.run(types=(0,), step=STEP + 1)
    assert watched.calls == [(STEP + 1, 0, 0), (STEP + 1, 0, 1)]


def test_a_stage_between_others_loads_nothing():
    watched = Watched()
    stages = [Stage(s, 3, dataset=watched if s == 1 else None) for s in range(3)]
    pipe = Pipe(3)
    in_threads(Stage.run, [(stage, pipe.end_of(stage.stage)) for stage in stages])
    assert watched.calls == []


def test_the_hook_sees_every_action_before_it_runs():
    stage = Stage(0, 1)
    program = stage.run()
    assert stage.seen == list(program)
    assert [a.op for a in program[:3]] == [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]


def test_statistics_are_told_by_the_stage_that_knows():
    first, middle, last = run_chain(3)
    for shard_type in TYPES:
        assert first.results[shard_type].loss_sum is None
        assert Digest.parse(first.results[shard_type].data) != Digest.zero()
        known = middle.results[shard_type]
        assert (known.loss_sum, known.tokens, known.data) == (None, None, None)
        assert last.results[shard_type].tokens == MICRO_BATCHES * SMALL["sequence"]
