"""Guards apply what their owners apply: the same bits, and the bytes of the layer once to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.train.crew import ADDRESS
from tests.train.quorum import make_config

from mainstay_core.base.shape import Order
from mainstay_core.job import model_sizes
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.rank_sizes import Made, even_shares, rank_sizes
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.serving import Source, Wanted
from mainstay_core.wire.reinitialisation import (
    BlockSource,
    MadeBlock,
    MadePosition,
    SourceKind,
)
from mainstay_core.wire.votes import Commit, GuardedDigest
from mainstay_train.compute.loader import Loader
from mainstay_train.compute.training import BlockTraining
from mainstay_train.exact import numerics
from mainstay_train.exact.blending import make_anew
from mainstay_train.exact.optimizer import REST_PARTS, StageState, part_of
from mainstay_train.exact.portions import Portion
from mainstay_train.models import llama
from mainstay_train.state.guards import GuardCopies
from mainstay_train.state.heal import HealClient, HealServer
from mainstay_train.sums import compiled, digests

COMMIT = Commit(step=0, norm=1, scale=0.5, tokens=1, loss=1, data="0" * 32)


class Wire:
    """A group of two: what one sends the other receives, in order."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_broken = self.is_aborted = False

    def send(self, message: Any) -> Any:
        self.sent.append(message.tensor.clone())

    def receive(self, message: Any) -> Any:
        if self.is_broken:
            raise GroupEnded("the owner is gone")
        return message, self.sent.pop(0)

    def finish(self, pending: Any) -> None:
        if pending is not None:
            message, tensor = pending
            message.tensor.copy_(tensor)

    def wait_for(self, moment: Any) -> None:
        del moment
        if self.is_aborted:
            raise GroupEnded("the owner was gone before the device had it")


def training_of(stages: int = 3, dtype: str = "float32") -> BlockTraining:
    config = make_config(stages=stages, order=Order.SWAPPED, dtype=dtype)
    config = replace(config, guards=2)
    workload = llama.workload({**config.workload, "layers": 2 * stages})
    loader = Loader(workload.dataset, "cpu", ahead=False)
    return BlockTraining(workload=workload, config=config, device="cpu", loader=loader)


def copy_from(copies: GuardCopies, end: int, portion: Portion | None) -> GuardedDigest:
    """Copy over the heal's transport what an owner serves."""
    server = HealServer(ADDRESS, lambda *_: portion)
    wanted = Wanted("q2-abc", end, 0, guarded=end)
    return copies.copy(HealClient(ADDRESS), [Source("a/0", server.address)], wanted)


def engine_of(training: BlockTraining, stage: int) -> Any:
    engine = training.build_engine(stage, training.config.shape.stages, 0, lambda _: None)
    engine.state.initialize(7)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("end", "twin", "block"), [(0, 1, "embedding"), (2, 1, "head")])
def test_a_guard_has_the_bits_of_its_owner_and_gives_them_back(
    end: int, twin: int, block: str, dtype: str
) -> None:
    numerics.setup("cpu")
    training = training_of(dtype=dtype)
    outline, owner, other = training.outline(), engine_of(training, end), engine_of(training, twin)
    held: list[GuardedDigest] = []
    giving = GuardCopies(training, outline, lambda: owner, lambda: ())
    taking = GuardCopies(training, outline, lambda: other, lambda: held)
    copy, _ = training.build_guarded(end)
    size = 4 * sum(part.layout.size for part in copy.blocks)
    wire: Any = Wire()
    generator = torch.Generator().manual_seed(3)
    assert copy_from(taking, end, giving.served(end, owner.state)) == giving.own_digest(0)
    for step in range(3):
        owner.reducer.reduced.copy_(torch.randn(owner.state.layout.size, generator=generator))
        giving.give(wire, [1])
        assert sum(sent.numel() * sent.element_size() for sent in wire.sent) == size
        taking.take(wire, end, 0)
        held[:] = [GuardedDigest(stage=end, masters="", rest="")]
        commit = replace(COMMIT, step=step)
        owner.apply(commit, 0.01, {})
        (told,) = taking.apply(commit, 0.01, {})
        held[:] = [told]
        assert told == giving.own_digest(step + 1)

    before = {f.id: f.tensor.clone() for f in owner.state.flats()}
    sources = (BlockSource(kind=SourceKind.GUARD, stage=twin, block=block),)
    made = MadePosition(stage=end, blocks=(MadeBlock(block=block, sources=sources),))
    kept = taking.served(end, other.state)
    assert kept is not None
    make_anew(owner.state, made, {}, {block: kept})
    for flat in owner.state.flats():
        is_back = torch.equal(flat.tensor, before[flat.id])
        assert is_back == (flat.name == block) or not before[flat.id].any()
    by_guards = {f.id: f.tensor.clone() for f in owner.state.flats()}
    for flat in owner.state.flats():
        flat.tensor.copy_(before[flat.id])
    make_anew(owner.state, made, {})  # what guards would give stays
    assert all(torch.equal(f.tensor, by_guards[f.id]) for f in owner.state.flats())
    moments = [f for f in kept.flats() if f.kind != "master"]
    assert any(f.tensor.any() for f in moments), "they are moments that were trained"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_guard_takes_the_memory_that_is_said_before(dtype: str) -> None:
    training = training_of(dtype=dtype)
    config = {**training.config.workload, "layers": 6}
    model = built_in_sizes(model_sizes.LLAMA, config, 1, 0, accumulates=True)
    (shares,) = {even_shares(training.config.shape)}
    ranks = rank_sizes(model, training.config.shape, shares, recompute=0.0, guards=2)
    for rank in ranks:
        states = [training.build_guarded(end)[0] for end in (0, 2) if rank.stage == 1]
        held = sum(
            f.tensor.numel() * f.tensor.element_size() for s in states for f in s.everything()
        )
        held += sum(4 * 2 * state.layout.size for state in states)
        assert rank.guarded_bytes == pytest.approx(held, rel=0.01)
        sent = [training.build_guarded(end)[0].layout.size for end in (0, 2) if rank.stage == end]
        assert rank.sent_guarded_bytes == 4 * sum(sent)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_making_a_stage_anew_takes_the_memory_that_is_said_before(
    dtype: str, averages: bool
) -> None:
    training = training_of(dtype=dtype)
    shape = training.config.shape
    config = {**training.config.workload, "layers": 6}
    model = built_in_sizes(model_sizes.LLAMA, config, 1, 0, accumulates=True)

    def held(state: StageState) -> int:
        kept = sum(f.tensor.numel() * f.tensor.element_size() for f in state.everything())
        return kept + 4 * max(block.layout.size for block in state.blocks)

    ranks = rank_sizes(
        model,
        shape,
        even_shares(shape),
        recompute=0.0,
        guards=2,
        made=Made(averages_optimizer=averages),
    )
    for rank in ranks:
        beside = [
            training.build_beside(stage, shape.stages, 0, masters_only=not averages)
            for stage in (rank.stage - 1, rank.stage + 1)
            if 0 <= stage < shape.stages
        ]
        if rank.stage in (0, 2):
            beside.append(training.build_guarded(rank.stage)[0])
        assert rank.making_bytes == pytest.approx(sum(map(held, beside)), rel=0.01)
    plain = rank_sizes(model, shape, even_shares(shape), recompute=0.0, guards=2)
    assert {rank.making_bytes for rank in plain} == {0}
    assert [rank.memory_bytes for rank in ranks] == [rank.memory_bytes for rank in plain]


def test_only_what_counts_is_served_and_what_others_own_is_not() -> None:
    training = training_of()
    other = engine_of(training, 1)
    held: list[GuardedDigest] = []
    copies = GuardCopies(training, training.outline(), lambda: other, lambda: held)
    assert copies.served(0, other.state) is None
    assert copies.own_digest(0) is None
    copy_from(copies, 0, Portion(training.build_guarded(0)[0], ["embedding"]))
    assert copies.served(0, other.state) is None
    held.append(GuardedDigest(stage=0, masters="", rest=""))
    assert copies.served(0, other.state) is not None
    held.clear()
    copies.keep(())
    assert copies.served(0, other.state) is None


def test_a_gradient_that_did_not_come_is_taken_into_other_memory() -> None:
    training = training_of()
    other = engine_of(training, 1)
    copies = GuardCopies(training, training.outline(), lambda: other, lambda: ())
    wire: Any = Wire()
    wire.is_broken = True
    with pytest.raises(GroupEnded):
        copies.take(wire, 0, 0)


def test_a_gradient_counts_once_the_device_has_it_and_its_group_stands() -> None:
    training = training_of()
    owner, other = engine_of(training, 0), engine_of(training, 1)
    copies = GuardCopies(training, training.outline(), lambda: other, lambda: ())
    given = GuardCopies(training, training.outline(), lambda: owner, lambda: ())
    wire: Any = Wire()
    taken = []
    for wire.is_aborted in (False, True):
        given.give(wire, [0])
        if wire.is_aborted:
            with pytest.raises(GroupEnded, match="before the device had it"):
                copies.take(wire, 0, 0)
        else:
            copies.take(wire, 0, 0)
        taken.append(copies._copies[0].gradient.data_ptr())
    assert taken[0] != taken[1], "what is still being written is in nobody's memory"


def test_one_bit_of_a_moment_that_differs_is_told_when_its_part_is_due() -> None:
    training = training_of()
    owner = engine_of(training, 0)
    copies = GuardCopies(training, training.outline(), lambda: owner, lambda: ())
    before = [copies.own_digest(step) for step in range(16)]
    moment = next(f for f in owner.state.flats() if f.kind == "exp_avg" and f.name == "embedding")
    moment.tensor[-1] += 1
    after = [copies.own_digest(step) for step in range(16)]
    changed = [b != a for b, a in zip(before, after, strict=True)]
    assert changed == [False] * 15 + [True]


@pytest.mark.parametrize("compiles", [True, False])
def test_what_votes_compare_of_a_copy_is_the_digest_of_its_tensors(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are drawn once for each part of the rest: also when it is due for the second time."""
    if not compiles:
        monkeypatch.setattr(compiled, "load", lambda: None)
    training = training_of()
    for end in (0, 2):
        state, _ = training.build_guarded(end)
        portion = Portion(state, [block.name for block in state.blocks])
        generator = torch.Generator().manual_seed(end)
        for step in range(REST_PARTS + 2):
            for flat in state.flats():
                flat.tensor.copy_(torch.randn(flat.tensor.shape, generator=generator))
            masters = [t for t in state.state_tensors() if t.kind == "master"]
            rest = [
                (f.id, part_of(f.tensor, step % REST_PARTS))
                for f in state.flats()
                if f.kind != "master"
            ]
            assert portion.digests(step) == (
                digests.digest_tensors((t.id, t.tensor) for t in masters).hex(),
                digests.digest_tensors((f"rest:{name}", part) for name, part in rest).hex(),
            )


def test_a_wrong_bit_in_keys_that_a_guard_keeps_makes_no_digest_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are drawn in a step: one of them would make its part's digests wrong after any copy."""
    pytest.importorskip("llvmlite")  # without it they are drawn for each digest
    training = training_of()
    state, _ = training.build_guarded(0)
    names = [block.name for block in state.blocks]
    right = [Portion(state, names).digests(step) for step in range(REST_PARTS)]
    drawn, calls = digests._drawn, [0]

    def drawn_wrongly(bases: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
        keys = drawn(bases, chunks)
        calls[0] += 1
        if calls[0] == wrong:
            keys[0, 0] ^= 1 << 40
        return keys

    for wrong in (1, 2, 3, 4):
        monkeypatch.setattr(digests, "_drawn", drawn_wrongly)
        calls[0] = 0
        portion = Portion(state, names)
        found = [portion.digests(step) for step in range(REST_PARTS)]
        assert calls[0] > wrong
        monkeypatch.setattr(digests, "_drawn", drawn)
        assert [portion.digests(step) for step in range(REST_PARTS)] == right == found


def test_what_is_served_goes_by_the_copies_that_are_there_and_the_blocks_asked_for() -> None:
    """A thread that serves may come between a copy's end and the word that it counts no more."""
    numerics.setup("cpu")
    training = training_of(stages=2)
    outline, owner = training.outline(), engine_of(training, 0)
    held = [GuardedDigest(stage=1, masters="", rest="")]
    copies = GuardCopies(training, outline, lambda: owner, lambda: held)

    assert copies.served(1, owner.state) is None
    own = copies.served(0, owner.state)
    assert own is not None
    assert {flat.name for flat in own.flats()} == {"embedding"}
