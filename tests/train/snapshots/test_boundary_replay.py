"""A stage of a chain computes its steps again, from copies of its units and what was sent to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pytest
import torch
from tests.train.snapshots.trained_chain import (
    LENGTH,
    NUM_STAGES,
    RATE,
    STEPS,
    Log,
    bits,
    commit_of,
    make_engine,
    train,
)

from mainstay_core.planning.program import Action, Op
from mainstay_core.wire.segments import SegmentKind
from mainstay_train.snapshots.unit_bytes import UnitBytes


@dataclass
class Again:
    """A step that is computed again from the neighbours' logs."""

    units: UnitBytes
    step: int
    frozen: Collection[str]
    logs: dict[str, Log]
    lowest: int = 0

    def skipped(self, block: int) -> Collection[str]:
        return self.units.skippable(block, self.frozen)

    def read(self, action: Action, into: torch.Tensor) -> None:
        direction = "F" if action.op is Op.READ_F else "B"
        log = self.logs[direction]
        into.copy_(log.kept[self.step, direction, action.type, action.micro_batch])


@pytest.mark.parametrize(
    ("model", "dtype"), [("llama", "float32"), ("moe", "bfloat16"), ("moe", "float32")]
)
def test_a_stage_computes_its_steps_again_while_units_are_frozen(model: str, dtype: str) -> None:
    trained = train(model, dtype)
    logs, copies = trained.logs, trained.copies
    for stage, before in enumerate(trained.engines):
        again = make_engine(model, dtype, stage)
        again.state.initialize(8)  # what is not loaded is wrong
        units = UnitBytes(again.state, again.reducer.reduced)
        order = list(range(len(units.names)))[::-1]
        relogged = Log()
        for step in range(STEPS):
            active = [n for place, n in enumerate(order) if place % LENGTH <= step]
            for number in order:
                turn = order.index(number) % LENGTH
                if turn == step:
                    copy = copies[stage][step][SegmentKind.STATE][number]
                    units.read(number, SegmentKind.STATE, memoryview(copy))
            again.state.refresh()
            for number in order:
                if number not in active:
                    copy = copies[stage][step][SegmentKind.COMPUTE][number]
                    units.read(number, SegmentKind.COMPUTE, memoryview(copy))
            frozen = {units.names[number] for number in order if number not in active}
            neighbours = {
                "F": logs[stage - 1] if stage else Log(),
                "B": logs[stage + 1] if stage + 1 < NUM_STAGES else Log(),
            }
            relogged.step = step
            work = Again(units, step, frozen, neighbours)
            if stage == 0:  # nobody needs the gradient of its input
                blocks = enumerate(again.state.blocks)
                active_blocks = [n for n, b in blocks if not frozen.issuperset(b.units)]
                work.lowest = min(active_blocks, default=len(again.state.blocks))
            again.compute_again(step, work, relogged)
            if not frozen:
                assert torch.equal(bits(again.reducer.reduced), trained.gradients[stage][step])
            names = [name for number in active for name in units.parameters[number]]
            again.apply_again(commit_of(again, step), RATE, names, {})
        for ours, theirs in zip(again.state.flats(), before.state.flats(), strict=True):
            assert torch.equal(bits(ours.tensor), bits(theirs.tensor)), ours.name
        assert relogged.kept.keys() == logs[stage].kept.keys()
        for key, tensor in relogged.kept.items():
            assert torch.equal(bits(tensor.reshape(-1)), bits(logs[stage].kept[key].reshape(-1)))
