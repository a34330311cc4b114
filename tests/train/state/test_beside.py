"""The states that a trainer copies beside its own, to make that anew of them."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.train.crew import ADDRESS
from tests.train.state.test_heal import WANTED, make_state
from tests.train.state.test_heal_compared import serve, worn

from mainstay_core.rank.serving import CopyOrder, HealFailed, Source
from mainstay_train.exact.optimizer import StageState, stateless
from mainstay_train.state.beside import BesideStates
from mainstay_train.state.heal import HealClient, HealServer, masters_digest

PLAN = SimpleNamespace(ranks_per_stage=1, num_stages=2)


class Training:
    """Builds like states; remembers which of them are there."""

    def __init__(self) -> None:
        self.built: list[weakref.ref[StageState]] = []

    def build_beside(
        self, stage: int, num_stages: int, inner: int, *, masters_only: bool
    ) -> StageState:
        assert (stage, num_stages, inner) in ((0, 2, 0), (1, 2, 0))
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


def orders_of(*sources: Source, expected: str = "") -> list[CopyOrder]:
    """Orders to copy the masters of positions 0, 1 and so on, each from one source."""
    return [
        CopyOrder((source,), replace(WANTED, position=i, masters_only=True), expected)
        for i, source in enumerate(sources)
    ]


def nobody(_: object) -> tuple[Source, ...]:
    return ()


def test_positions_are_copied_at_the_same_time() -> None:
    """Each source serves only once both have been asked."""
    states, both = [make_state(seed, "bfloat16") for seed in (1, 2)], threading.Barrier(2)
    asked: set[int] = set()

    def source(number: int) -> Source:
        def state_at(*_: object) -> StageState:
            if number not in asked:  # it asks again after each chunk
                asked.add(number)
                both.wait(timeout=60)
            return states[number]

        return Source(f"{number}/0", HealServer(ADDRESS, state_at).address)

    beside, client = BesideStates(Training()), HealClient(ADDRESS)
    orders = orders_of(source(0), source(1))
    beside.begin(client, PLAN, orders, nobody)

    found = [beside.copy(client, PLAN, *order) for order in orders]

    assert found == [masters_digest(state) for state in states]


def test_a_first_attempt_that_fails_is_followed_by_another_one_to_the_same_memory() -> None:
    training, good = Training(), make_state(1, "bfloat16")
    beside, client = BesideStates(training), HealClient(ADDRESS)
    (source,) = serve(good)
    orders = orders_of(source, source, expected=masters_digest(make_state(2, "bfloat16")))
    beside.begin(client, PLAN, orders, nobody)
    for order in orders:
        with pytest.raises(HealFailed, match="a/0 has digest"):
            beside.copy(client, PLAN, *order)

    for order in orders_of(source, source, expected=masters_digest(good)):
        assert beside.copy(client, PLAN, *order) == masters_digest(good)

    assert training.num_kept == 2


def test_what_is_still_being_copied_ends_when_the_stage_is_not_made() -> None:
    training, over, is_asked = Training(), threading.Event(), threading.Event()

    def state_at(*_: object) -> None:
        is_asked.set()
        over.wait()

    slow = Source("b/0", HealServer(ADDRESS, state_at).address)
    gone, client = serve(None)[0], HealClient(ADDRESS)
    beside = BesideStates(training)
    orders = orders_of(gone, slow)
    beside.begin(client, PLAN, orders, nobody)
    is_asked.wait()
    with pytest.raises(HealFailed, match="is over here"):
        beside.copy(client, PLAN, *orders[0])

    beside.drop()

    over.set()
    assert training.num_kept == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("copy-beside")]
