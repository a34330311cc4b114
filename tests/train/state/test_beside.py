"""The states that a trainer copies beside its own, to make that anew of them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.train.crew import ADDRESS
from tests.train.state.test_heal import WANTED, make_state
from tests.train.state.test_heal_compared import serve, worn

from mainstay_core.rank.serving import HealFailed
from mainstay_train.exact.optimizer import StageState, stateless
from mainstay_train.state.beside import BesideStates
from mainstay_train.state.heal import HealClient, masters_digest

PLAN = SimpleNamespace(ranks_per_stage=1, num_stages=2)


class Training:
    """Builds like states; remembers which of them are there."""

    def __init__(self) -> None:
        self.built: list[weakref.ref[StageState]] = []

    def build_beside(
        self, stage: int, num_stages: int, inner: int, *, masters_only: bool
    ) -> StageState:
        assert (stage, num_stages, inner) == (1, 2, 0)
        state = make_state(None, "bfloat16")
        if masters_only:
            state = StageState(state.blocks, stateless)
        self.built.append(weakref.ref(state))
        return state

    @property
    def num_kept(self) -> int:
        gc.collect()
        return sum(state() is not None for state in self.built)


def copy(beside: BesideStates, *holders: StageState, masters_only: bool) -> str:
    wanted, sources = replace(WANTED, masters_only=masters_only), serve(*holders)
    return beside.copy(HealClient(ADDRESS), PLAN, sources[:1], wanted, "", holders=sources)


def test_what_a_making_that_ended_has_copied_is_not_kept_nor_used_by_the_next_one() -> None:
    training, source = Training(), make_state(1, "bfloat16")
    beside = BesideStates(training)

    copy(beside, source, masters_only=True)
    assert training.num_kept == 1
    beside.drop()
    assert training.num_kept == 0
    assert copy(beside, source, masters_only=False) == masters_digest(source)
    (kept,) = [state() for state in training.built if state() is not None]
    assert {flat.kind for flat in kept.flats()} == {"master", "exp_avg", "exp_avg_sq", "step"}


def test_moments_that_are_averaged_are_compared_with_all_who_have_them() -> None:
    good, bad = make_state(1, "bfloat16"), worn("exp_avg")
    expected = masters_digest(good)
    assert masters_digest(bad) == expected

    assert copy(BesideStates(Training()), bad, good, masters_only=True) == expected
    with pytest.raises(HealFailed, match=r"exp_avg:.* of the copy is not what b/0 has"):
        copy(BesideStates(Training()), bad, good, masters_only=False)
    assert copy(BesideStates(Training()), good, bad, good, masters_only=False) == expected
