"""A training loop of one's own, whose step is computed again and again."""

from __future__ import annotations

from dataclasses import replace

import torch
from benchmarks.support.flips.chains import StepFailedError
from benchmarks.support.flips.rank import RATE, SCALE, Listing, Outcome, Spot, Variant
from tests.train.session.test_work import DATA, TYPES, Loop, plainly

from mainstay_core.dmr.flips import Flip
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.wire.votes import Commit
from mainstay_train.checks.checker import NOWHERE
from mainstay_train.kernels import bits
from mainstay_train.session.loop import Step


class LoopChain:
    """A loop's one rank.

    Args:
        dtype: in which it computes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._loops: dict[Variant, Loop] = {}

    def reset(self, variant: Variant) -> None:
        self._loops[variant] = Loop(variant.mode, self._dtype)

    def order(self, variant: Variant, flip: Flip, spot: Spot) -> None:
        self._loops[variant].checks.order("drawn", 0, spot.place.phase, flip)

    def compute(self, variant: Variant, step: int) -> bool:
        loop = self._loops[variant]
        loop.checks.begin_step(step)
        try:
            of_step = Step(loop.driver, DATA, step, TYPES)
            for work in of_step.work():
                loss = plainly(loop.module, work)
                loss.backward()  # type: ignore[no-untyped-call]
                work.done(loss, tokens=8)
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        return False

    def drop(self, variant: Variant) -> None:
        self._loops[variant].driver.engine.drop_held()

    def finish(self, variant: Variant, step: int) -> list[Outcome]:
        loop = self._loops[variant]
        engine = loop.driver.engine
        try:
            table = [Supply(partial=partial, index=0) for partial in engine.store.held()]
            engine.reduce(None, table, [0], 0)
            ballot = engine.ballot(None, table, 0, NOWHERE, "", step)
            commit = Commit(step=step, norm=1.0, scale=SCALE, tokens=1, loss=0.0, data="0" * 32)
            masters = engine.apply(commit, RATE)
        except Exception as error:
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        state = bits.digest_of([flat.tensor for flat in engine.state.flats()])
        engine.drop_held()
        return [((repr(replace(ballot, rest="")), masters, state), tuple(loop.findings))]

    def list_spots(self, variant: Variant) -> list[Spot]:
        self.reset(variant)
        listing = Listing(0)
        self._loops[variant].checks.take_orders(listing)
        self.compute(variant, 0)
        self.finish(variant, 0)
        return listing.spots

    def close(self) -> None:
        """Nothing is kept."""
