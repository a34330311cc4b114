"""Chains whose micro-batches take two routes, against a model that takes them one by one."""

import pytest
import torch
from tests.train.compute.test_interpreter import (
    MICRO_BATCHES,
    SEED,
    SHARDS_PER_LANE,
    SMALL,
    STEP,
    TYPES,
    Pipe,
    Stage,
    StrictPipe,
    equal,
    gradients,
    in_threads,
    run_chain,
    stats,
    types_held,
    until_broken,
)

from mainstay_core.base.shape import Cut, Order
from mainstay_core.planning.routes import Extent, route_of
from mainstay_train.exact.draws import Address
from mainstay_train.exact.optimizer import StageState
from mainstay_train.exact.reduction import PartialStore
from mainstay_train.model import workload

LAYERS = {2: 4, 3: 3, 4: 4, 5: 6}
both = pytest.mark.parametrize("kind", [Pipe, StrictPipe])


def path(number, cuts):
    """The numbers of the blocks through which a flow goes, in order."""
    last = len(cuts) - 1
    for stage, extent in route_of(Order.SWAPPED, number, len(cuts)):
        blocks = [*cuts[stage]]
        if extent is Extent.LAYERS:
            blocks = blocks[stage == 0 : len(blocks) - (stage == last)]
        yield from {Extent.EMBEDDING: blocks[:1], Extent.HEAD: blocks[-1:]}.get(extent, blocks)


def alone(num_stages, layers, **config):
    """Bits of every partial, and losses, of a model that takes one micro-batch after the other."""
    model = workload.load("", {**SMALL, **config, "layers": layers})
    cuts = model.stages(num_stages, Cut.EQUAL)
    state = StageState(model.build(range(layers + 2)), model.optimizer)
    state.initialize(SEED)
    store = PartialStore(state.layout, SHARDS_PER_LANE)
    losses = {}
    for shard_type in TYPES:
        losses[shard_type] = 0.0
        for micro_batch in range(MICRO_BATCHES):
            address = Address(SEED, STEP, shard_type, micro_batch)
            batch = model.dataset.batch(address)
            x, tapes = batch.tokens, []
            *inner, head = path(shard_type * MICRO_BATCHES + micro_batch, cuts)
            for number in inner:
                tapes.append((number, state.blocks[number].recompute(x, address)))
                x = tapes[-1][1].output.detach()
            tapes.append((head, state.blocks[head].recompute_loss(x, batch.targets, address)))
            losses[shard_type] += float(tapes[-1][1].loss)
            gradient = None
            for number, tape in reversed(tapes):
                block = state.blocks[number]
                gradient = block.backward_input(tape, gradient)
                block.backward_weight(tape, store.scratch_views, accumulate=micro_batch > 0)
        store.complete(shard_type)
    found = {
        (partial, name): view.view(torch.int32).clone()
        for partial, flat in store.partials.items()
        for name, view in state.layout.views(flat).items()
    }
    return found, losses


def swapped(num_stages, kind=Pipe, **options):
    layers = LAYERS[num_stages]
    return run_chain(num_stages, kind, order=Order.SWAPPED, layers=layers, **options)


@both
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_gradients_are_those_of_a_model_that_takes_the_routes_one_by_one(num_stages, kind):
    chain = swapped(num_stages, kind)

    expected, losses = alone(num_stages, LAYERS[num_stages])
    assert equal(gradients(chain), expected)
    assert {t: float(loss) for t, (loss, _, _) in stats(chain).items()} == losses
    in_order = run_chain(1, layers=LAYERS[num_stages])
    assert not equal(gradients(in_order), expected)
    assert [s[1:] for s in stats(chain).values()] == [s[1:] for s in stats(in_order).values()]


@pytest.mark.parametrize(("num_stages", "dtype"), [(5, "float32"), (4, "bfloat16")])
def test_bits_are_those_without_recompute(num_stages, dtype):
    expected, _ = alone(num_stages, LAYERS[num_stages], dtype=dtype)

    for recompute in (False, True, 0.5):
        chain = swapped(num_stages, StrictPipe, recompute=recompute, dtype=dtype)
        assert equal(gradients(chain), expected)


@both
@pytest.mark.parametrize(("breaker", "received"), [(0, 3), (2, 0), (3, 8)])
def test_an_interrupted_chain_keeps_whole_types_and_goes_on(breaker, received, kind):
    expected, _ = alone(4, LAYERS[4])
    pipe = kind(4)
    stages = [Stage(s, 4, order=Order.SWAPPED, layers=LAYERS[4]) for s in range(4)]
    ends = [pipe.end_of(s, received if s == breaker else None) for s in range(4)]
    in_threads(until_broken, zip(stages, ends, strict=True))

    for stage in stages:
        done = types_held(stage)
        assert done == set(stage.results)
        left, again = [t for t in TYPES if t not in done], kind(4)
        others = [Stage(s, 4, order=Order.SWAPPED, layers=LAYERS[4]) for s in range(4)]
        others[stage.stage] = stage
        in_threads(Stage.run, [(other, again.end_of(other.stage), left) for other in others])
        mine = gradients([stage])
        assert equal(mine, {key: expected[key] for key in mine})
        assert {t for partial, _ in mine for t in range(partial.first, partial.last + 1)} == {
            *TYPES
        }
