from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import pytest

from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.base.values import replace
from mainstay_core.rank.state import RankState
from mainstay_core.supervisor.state import SlotPhase, SlotState
from mainstay_core.wire.facts import TrainerUp
from mainstay_core.wire.votes import Commit

STATE = RankState(
    slot=Slot(pod=PodUid("pod1"), index=0),
    incarnation=Incarnation("a"),
    num_steps=10,
    shards_per_lane=2,
    clip_norm=None,
    heal_address="here",
)
COMMIT = Commit(step=1, norm=1.0, scale=0.5, tokens=4, loss=2.0, data="0")


@dataclass(frozen=True)
class _WithoutSlots:
    one: int = 1
    other: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    one: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    one: int = 1
    made: int = dataclasses.field(default=7, init=False)


@pytest.mark.parametrize(
    ("value", "news"),
    [
        (STATE, {"version": 3, "commit": COMMIT, "held": (), "mark": "q1-a", "digest": "d"}),
        (COMMIT, {"step": 2, "norm": 2.0, "statistics": (1, 2)}),
        (SlotState(index=0), {"phase": SlotPhase.UP, "pid": 3, "alive_at_s": 1.0}),
        (QuorumId(id=1, nonce="a"), {"id": 2, "nonce": "b"}),
        (_WithoutSlots(), {"one": 3, "other": 4}),
        (_Alone(), {"one": 3}),
    ],
)
def test_a_changed_copy_is_that_of_the_standard_library(value: Any, news: dict[str, Any]) -> None:
    rng = random.Random(type(value).__name__)
    for _ in range(50):
        some = {name: new for name, new in news.items() if rng.random() < 0.5}
        copy = replace(value, **some)
        assert copy == dataclasses.replace(value, **some)
        assert type(copy) is type(value)
        assert copy is not value


def test_a_copy_is_checked_as_a_new_value_is() -> None:
    up = TrainerUp(pod=PodUid("p"), slot=0, incarnation=Incarnation("a"), fingerprint={})
    long = "x" * 100_000
    copy = replace(up, evidence=long)
    assert copy == dataclasses.replace(up, evidence=long)
    assert len(copy.evidence) < len(long)


def test_a_field_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Slot has no field 'place'"):
        replace(STATE.slot, place=1)  # type: ignore[call-arg]


def test_what_a_constructor_does_not_take_is_left_to_the_standard_library() -> None:
    assert replace(_Counted(), one=3) == dataclasses.replace(_Counted(), one=3)
    with pytest.raises(ValueError, match="made"):
        replace(_Counted(), made=3)  # type: ignore[misc]
