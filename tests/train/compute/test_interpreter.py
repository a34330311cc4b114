import contextlib
import queue
import threading

import pytest
import torch
from tests.train.crew import ADDRESS, make_group
from tests.train.stages import build_stage
from torch.distributed import TCPStore

from mainstay_core.base.digest import Digest
from mainstay_core.planning.program import Op, compile_compute
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm.group import Group, Pending
from mainstay_train.compute.interpreter import Interpreter
from mainstay_train.compute.measure import LiveBytes
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.model import workload

SMALL = {"dim": 16, "layers": 3, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
SEED, MICRO_BATCHES, STEP = 5, 2, 3
TYPES = (0, 1, 3)
SHARDS_PER_LANE = 2


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

    def check(self):
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
        self.send_and_receive, self.check = group.send_and_receive, group.check

    def finish(self, pending):
        if self._left is not None and pending.into is not None:
            if self._left == 0:
                self._pipe.shutdown()
                raise GroupEnded("the neighbour is gone")
            self._left -= 1
        self._group.finish(pending)


class Stage:
    """One cell: its blocks, store and interpreter."""

    def __init__(self, stage, num_stages, *, recompute=False, dtype="float32", **config):
        self.stage, self.num_stages = stage, num_stages
        model = workload.load("", {**SMALL, "dtype": dtype, **config})
        self.state = build_stage(model, num_stages, stage)
        self.state.initialize(SEED)
        self.store = PartialStore(self.state.layout, SHARDS_PER_LANE)
        self.stats = {}
        self.seen = []
        self.interpreter = Interpreter(
            workload=model,
            blocks=self.state.blocks,
            stage=stage,
            num_stages=num_stages,
            seed=SEED,
            micro_batches=MICRO_BATCHES,
            store=self.store,
            stats=self.stats,
            recompute=recompute,
            hook=self.seen.append,
        )

    def run(self, chain=None, types=TYPES):
        program = compile_compute(types, MICRO_BATCHES, self.stage, self.num_stages)
        self.interpreter.run(program, STEP, chain)
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
    first, last = stages[0].stats, stages[-1].stats
    return {t: (last[t].loss_sum, last[t].tokens, first[t].data) for t in TYPES}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


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


def test_types_do_not_depend_on_each_other():
    together, alone = run_chain(1)[0], Stage(0, 1)
    alone.run(types=(3,))
    (partial,) = alone.store.held()
    assert torch.equal(alone.store.partials[partial], together.store.partials[partial])
    assert alone.stats[3] == together.stats[3]


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
        assert done == set(stage.stats)
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

    assert types_held(stage) == set(stage.stats) == {TYPES[0]}


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


def test_the_hook_sees_every_action_before_it_runs():
    stage = Stage(0, 1)
    program = stage.run()
    assert stage.seen == list(program)
    assert [a.op for a in program[:3]] == [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]


def test_statistics_are_told_by_the_stage_that_knows():
    first, middle, last = run_chain(3)
    for shard_type in TYPES:
        assert first.stats[shard_type].loss_sum is None
        assert Digest.parse(first.stats[shard_type].data) != Digest.zero()
        stat = middle.stats[shard_type]
        assert (stat.loss_sum, stat.tokens, stat.data) == (None, None, None)
        assert last.stats[shard_type].tokens == MICRO_BATCHES * SMALL["sequence"]
