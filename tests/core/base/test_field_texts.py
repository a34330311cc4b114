"""The JSON of a value of which little has changed is that of the codec."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from mainstay_core.base import codec
from mainstay_core.base.field_texts import FieldTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    name: str
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    zone: str = "a"
    slots: tuple[_Slot, ...] = ()
    by_name: dict[str, float] = field(default_factory=dict)
    pair: tuple[int, str] = (1, "b")
    plan: _Slot | None = None
    rare: tuple[_Slot, ...] = field(default=(), metadata=codec.OMITTED)
    rare_number: int = field(default=0, metadata=codec.OMITTED)


def _change(state: _State, rng: random.Random) -> _State:
    slots = list(state.slots)
    match rng.randrange(8):
        case 0:
            slots.insert(rng.randrange(len(slots) + 1), _Slot(name=f"s{rng.randrange(9)}"))
        case 1 if slots:
            del slots[rng.randrange(len(slots))]
        case 2 if slots:
            at = rng.randrange(len(slots))
            slots[at] = replace(slots[at], step=slots[at].step + 1)
        case 3:
            rng.shuffle(slots)
        case 4:
            return replace(state, by_name={**state.by_name, f"n{rng.randrange(5)}": rng.random()})
        case 5:
            return replace(state, rare=tuple(slots[:1]), rare_number=rng.randrange(2))
        case 6 if slots:
            slots.append(slots[0])  # the same object twice
        case _:
            plan = rng.choice((None, _Slot(name="p"), *slots))
            return replace(state, plan=plan, zone=rng.choice(("a", '\u00e9"')))
    return replace(state, slots=tuple(slots))


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_that_of_the_codec_whatever_has_changed(seed: int) -> None:
    rng, texts, state = random.Random(seed), FieldTexts(), _State()
    history = [state]
    for _ in range(60):
        # A decision that is not stored is followed by one from an older state.
        state = _change(rng.choice((state, state, state, rng.choice(history))), rng)
        history.append(state)
        assert texts.dumps(state) == codec.dumps(state)


def test_what_is_the_same_object_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tuple(_Slot(name=f"s{i}") for i in range(5))
    texts, state = FieldTexts(), _State(slots=slots, plan=slots[0])
    texts.dumps(state)
    written: list[object] = []
    plain = codec.dumps

    def dumps(value: object) -> str:
        written.append(value)
        return plain(value)

    monkeypatch.setattr(codec, "dumps", dumps)
    newer = replace(slots[2], step=7)
    texts.dumps(replace(state, slots=(*slots[:2], newer, *slots[3:])))
    assert written == [newer]
