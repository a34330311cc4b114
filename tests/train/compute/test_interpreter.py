import contextlib
import queue
import threading

import pytest
import torch
from tests.train.stages import build_stage

from mainstay_core.base.digest import Digest
from mainstay_core.planning.program import Op, compile_compute
from mainstay_core.rank.connections import GroupEnded
from mainstay_train.compute.interpreter import Interpreter
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.model import workload

SMALL = {"dim": 16, "layers": 3, "heads": 2, "kvHeads": 1, "hidden": 32, "sequence": 8}
SEED, MICRO_BATCHES, STEP = 5, 2, 3
TYPES = (0, 1, 3)
SHARDS_PER_LANE = 2


class Pipe:
    """A chain's group in-process: queues between threads, one per (source, target, tag)."""

    def __init__(self):
        self._lock = threading.Lock()
        self._queues = {}
        self._ended = False

    def end_of(self, stage, breaks_after=None):
        return PipeEnd(self, stage, breaks_after)

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
    """One stage's end; it breaks the pipe in place of its nth receive."""

    def __init__(self, pipe, stage, breaks_after):
        self._pipe, self._stage, self._left = pipe, stage, breaks_after

    def send(self, tensor, peer, tag):
        self._pipe.line(self._stage, peer, tag).put(tensor.clone())

    def receive(self, tensor, peer, tag):
        if self._left == 0:
            self._pipe.shutdown()
        if self._left is not None:
            self._left -= 1
        message = self._pipe.line(peer, self._stage, tag).get()
        if message is None or (self._left is not None and self._left < 0):
            raise GroupEnded("the neighbour is gone")
        tensor.copy_(message)

    def finish(self, work):
        del work


class Stage:
    """One cell: its blocks, store and interpreter."""

    def __init__(self, stage, num_stages, *, recompute=False, dtype="float32"):
        self.stage, self.num_stages = stage, num_stages
        model = workload.load("", {**SMALL, "dtype": dtype})
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

    def run(self, pipeline=None, types=TYPES):
        program = compile_compute(types, MICRO_BATCHES, self.stage, self.num_stages)
        self.interpreter.run(program, STEP, pipeline)
        return program


def run_chain(num_stages, **options):
    stages = [Stage(s, num_stages, **options) for s in range(num_stages)]
    if num_stages == 1:
        stages[0].run()
        return stages
    pipe = Pipe()
    in_threads(Stage.run, [(stage, pipe.end_of(stage.stage)) for stage in stages])
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_same_bits_whatever_the_cut_and_the_recompute(dtype):
    reference = run_chain(1, dtype=dtype)
    assert all(tensor.any() for tensor in gradients(reference).values())
    for num_stages in (2, 3, 5):
        chain = run_chain(num_stages, dtype=dtype)
        assert equal(gradients(chain), gradients(reference))
        assert stats(chain) == stats(reference)
    for num_stages in (1, 2):
        chain = run_chain(num_stages, dtype=dtype, recompute=True)
        assert equal(gradients(chain), gradients(reference))
        assert stats(chain) == stats(reference)


def test_types_do_not_depend_on_each_other():
    together, alone = run_chain(1)[0], Stage(0, 1)
    alone.run(types=(3,))
    (partial,) = alone.store.held()
    assert torch.equal(alone.store.partials[partial], together.store.partials[partial])
    assert alone.stats[3] == together.stats[3]


@pytest.fixture(scope="module")
def undisturbed():
    return run_chain(2)


@pytest.mark.parametrize("breaker", [0, 1])
@pytest.mark.parametrize("received", [0, 1, 2, 3, 5])
def test_an_interrupted_chain_keeps_whole_types_and_goes_on(undisturbed, breaker, received):
    pipe = Pipe()
    stages = [Stage(0, 2), Stage(1, 2)]
    ends = [pipe.end_of(s, received if s == breaker else None) for s in range(2)]
    in_threads(until_broken, zip(stages, ends, strict=True))
    for stage in stages:
        done = types_held(stage)
        assert done == set(stage.stats)
        if stage.stage == breaker:
            assert len(done) == received // MICRO_BATCHES
        left = [t for t in TYPES if t not in done]
        again, neighbour = Pipe(), Stage(1 - stage.stage, 2)
        in_threads(Stage.run, [(x, again.end_of(x.stage), left) for x in (stage, neighbour)])
        assert equal(gradients([stage]), gradients([undisturbed[stage.stage]]))


def types_held(stage):
    return {t for p in stage.store.held() for t in range(p.first, p.last + 1)}


def in_threads(run, arguments):
    threads = [threading.Thread(target=run, args=args) for args in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def until_broken(stage, pipeline):
    with contextlib.suppress(GroupEnded):
        stage.run(pipeline)


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
