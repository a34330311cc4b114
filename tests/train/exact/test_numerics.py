"""The oracle: one process plays every rank, and no cut of the work changes a bit."""

from dataclasses import dataclass

import pytest
import torch
from tests.train.norms import block_norms_sq
from tests.train.stages import build_stage

from mainstay_core.base import digest
from mainstay_core.rank import votes
from mainstay_train.exact import draws, layout, numerics, optimizer
from mainstay_train.model import data, workload
from mainstay_train.sums import digests, norms

LANES, SHARDS_PER_LANE, MICRO_BATCHES, SEED = 4, 2, 2, 7


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = ["lane", "stage", "replica", "vote", "heal", "spare", "bits"]
    for i in range(5):
        text = " ".join(words[(i * 31 + j * j) % len(words)] for j in range(900))
        (folder / f"part{i}.txt").write_text(text)
    return str(folder)


def _llama(corpus, **changes):
    config = {
        "dim": 24, "layers": 4, "heads": 4, "kvHeads": 2, "hidden": 44, "sequence": 12,
        "microBatchSize": 2, "dropout": 0.1, "lr": 1e-2, "warmupSteps": 2, "clipNorm": 0.5,
        "data": {"path": corpus},
    }  # fmt: skip
    return workload.load("", config | changes)


@dataclass
class Outcome:
    steps: list[tuple[str, str]]
    losses: list[float]
    data: str


def _compute_type(model, stages, address, gradients):
    """One micro-batch down and up a chain of stages, tensors passed by hand."""
    batch = model.dataset.batch(address)
    x, inputs = batch.tokens, []
    chain = [block for stage in stages for block in stage.blocks]
    for block in chain[:-1]:
        inputs.append(x)
        x = block.forward(x, address)
    tapes = [chain[-1].recompute_loss(x, batch.targets, address)]
    loss = tapes[0].loss
    dy, done = None, []
    for number in range(len(chain) - 1, -1, -1):
        block = chain[number]
        tape = tapes[0] if dy is None else block.recompute(inputs[number], address)
        dy = block.backward_input(tape, dy)
        done.append((block, tape))
    for block, tape in done:  # weight gradients wait, as in a zero-bubble schedule
        block.backward_weight(tape, gradients, accumulate=address.micro_batch > 0)
    return loss, data.num_tokens(batch), data.consumed_digest(address, batch)


def _lane_sum(partials):
    """Canonical: the leading run, then single types ascending; copied, never 0 + x."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total.add_(partial)
    return total


def _train(model, *, num_stages, replicas, steps, hand_off=False):
    """Train with ``replicas`` chains of ``num_stages`` cells, states never shared.

    With ``hand_off`` each lane's last type is computed by the next replica and comes
    as a partial of its own, as after a failure.
    """
    cells = [
        [build_stage(model, num_stages, stage) for stage in range(num_stages)]
        for _ in range(replicas)
    ]
    for chain in cells:
        for cell in chain:
            cell.initialize(SEED)
    outcome = Outcome([], [], "")
    consumed = digest.Digest.zero()
    for step in range(steps):
        lanes: list[list[list[torch.Tensor]]] = []
        losses, count = [], 0
        for lane in range(LANES):
            partials: list[list[torch.Tensor]] = [[] for _ in range(num_stages)]
            for index in range(SHARDS_PER_LANE):
                moved = hand_off and index == SHARDS_PER_LANE - 1
                chain = cells[(lane + moved) % replicas]
                scratch = [cell.layout.allocate().fill_(float("nan")) for cell in chain]
                for cell, flat in zip(chain, scratch, strict=True):
                    _clear_gaps(cell.layout, flat)
                views = {}
                for cell, flat in zip(chain, scratch, strict=True):
                    views |= cell.layout.views(flat)
                for micro_batch in range(MICRO_BATCHES):
                    shard_type = lane * SHARDS_PER_LANE + index
                    address = draws.Address(SEED, step, shard_type, micro_batch)
                    loss, num_tokens, eaten = _compute_type(model, chain, address, views)
                    losses.append(float(loss))
                    count += num_tokens
                    consumed += eaten
                for held, flat in zip(partials, scratch, strict=True):
                    if held and not moved:
                        held[-1].add_(flat)  # extends the leading run
                    else:
                        held.append(flat)
            lanes.append(partials)
        reduced = []
        for stage in range(num_stages):
            total = _lane_sum(lanes[0][stage])
            for lane in range(1, LANES):
                total.add_(_lane_sum(lanes[lane][stage]))
            reduced.append(cells[0][stage].layout.block_views(total))
        found = block_norms_sq(flat for stage in reduced for flat in stage)
        _, scale = votes.clip(found, count, model.clip_norm)
        for chain in cells:
            for cell, gradient in zip(chain, reduced, strict=True):
                cell.apply(gradient, scale, model.learning_rate(step))
        outcome.steps.append(_agreed_digests(cells))
        outcome.losses.append(norms.fold(losses) / count)
    outcome.data = consumed.hex()
    return outcome


def _clear_gaps(stage_layout, flat):
    for block, part in zip(stage_layout.blocks, stage_layout.block_views(flat), strict=True):
        for param in block.params:
            end = param.offset + param.numel
            part[end : param.offset + layout.padded(param.numel)] = 0


def _agreed_digests(cells):
    """(masters, all state), the same in every replica."""
    found = set()
    for chain in cells:
        states = [item for cell in chain for item in cell.state_tensors()]
        masters = digests.digest_tensors((s.id, s.tensor) for s in states if s.kind == "master")
        whole = digests.digest_tensors((s.id, s.tensor) for s in states)
        found.add((masters.hex(), whole.hex()))
    assert len(found) == 1, "replicas differ"
    return found.pop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_stages_nor_replicas_nor_on_who_computes_a_type(corpus, dtype):
    model = _llama(corpus, dtype=dtype)
    reference = _train(model, num_stages=1, replicas=1, steps=3)
    assert reference.losses[-1] < reference.losses[0]
    assert len(set(reference.steps)) == 3
    for stages, replicas, hand_off in [
        (2, 1, False), (4, 1, False), (6, 1, False), (1, 2, False), (2, 2, True), (4, 4, True),
    ]:  # fmt: skip
        found = _train(model, num_stages=stages, replicas=replicas, steps=3, hand_off=hand_off)
        assert found == reference, f"{stages} stages, {replicas} replicas, hand-off {hand_off}"


def test_the_demo_models_layers_keep_their_bits_on_any_number_of_stages(corpus):
    model = _llama(
        corpus, dim=192, layers=2, heads=6, kvHeads=2, hidden=512, sequence=128, microBatchSize=1
    )
    reference = _train(model, num_stages=1, replicas=1, steps=1)
    assert _train(model, num_stages=2, replicas=2, steps=1, hand_off=True) == reference
    assert _train(model, num_stages=4, replicas=1, steps=1) == reference


def test_a_users_own_model_keeps_its_bits_too():
    model = workload.load("examples/custom_model.py:workload", {"width": 24, "layers": 3})
    reference = _train(model, num_stages=1, replicas=1, steps=3)
    assert _train(model, num_stages=3, replicas=2, steps=3, hand_off=True) == reference


def test_seed_and_dropout_matter(corpus):
    plain = _train(_llama(corpus, dropout=0.0), num_stages=1, replicas=1, steps=1)
    dropped = _train(_llama(corpus), num_stages=1, replicas=1, steps=1)
    assert plain.data == dropped.data
    assert plain.steps != dropped.steps


def test_healing_by_flat_buffers_gives_the_same_future(corpus):
    model = _llama(corpus, dtype="bfloat16")
    old, new = (optimizer.StageState(model.build(range(6)), model.optimizer) for _ in range(2))
    old.initialize(SEED)

    def step(state, number):
        gradient = state.layout.allocate()
        for micro_batch in range(2):
            address = draws.Address(SEED, number, 0, micro_batch)
            _, num_tokens, _ = _compute_type(model, [state], address, state.layout.views(gradient))
        reduced = state.layout.block_views(gradient)
        _, scale = votes.clip(block_norms_sq(reduced), num_tokens, 1.0)
        state.apply(reduced, scale, model.learning_rate(number))

    step(old, 0)
    step(old, 1)
    for source, target in zip(old.flats(), new.flats(), strict=True):
        assert source[:2] == target[:2]
        target.tensor.copy_(source.tensor)
    new.refresh()
    step(old, 2)
    step(new, 2)
    assert _agreed_digests([[old], [new]])
