"""One codec for all messages: round trips, tolerance of newer peers, errors by path."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base.bounds import Count, CountOrNone, Finite, Longest, Seconds, is_utf8
from mainstay_core.base.codec import OMITTED, decode, dumps, encode, loads
from mainstay_core.base.errors import MalformedError, RemoteProtocolError
from mainstay_core.base.ids import Incarnation


class Colour(enum.StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    number: int
    ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    name: Incarnation
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    colour: Colour = Colour.RED
    tags: frozenset[str] = frozenset()
    counts: Mapping[int, str] = field(default_factory=dict)
    anything: Any = None
    flag: bool = False


FULL = Tree(
    name=Incarnation("x"),
    leaf=Leaf(number=1, ratio=0.5),
    leaves=(Leaf(number=2), Leaf(number=3)),
    pair=("b", 7),
    tags=frozenset({"q", "p"}),
    counts={3: "three", 1: "one"},
    anything={"free": [1, None, "text"]},
    flag=True,
)


def test_a_value_comes_back_equal() -> None:
    assert loads(Tree, dumps(FULL)) == FULL
    assert decode(Tree, encode(FULL)) == FULL


def test_a_field_that_is_omitted_while_empty_is_sent_only_when_it_is_not() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Counted:
        name: str
        counts: tuple[int, ...] = field(default=(), metadata=OMITTED)

    assert dumps(Counted(name="a")) == '{"name":"a"}'
    assert dumps(Counted(name="a", counts=(0,))) == '{"counts":[0],"name":"a"}'
    for value in (Counted(name="a"), Counted(name="a", counts=(0, 3))):
        assert loads(Counted, dumps(value)) == value


def test_equal_values_have_equal_bytes_in_whatever_order_they_were_made() -> None:
    other = Tree(
        name=Incarnation("x"),
        leaf=Leaf(ratio=0.5, number=1),
        leaves=[Leaf(number=2), Leaf(number=3)],  # type: ignore[arg-type]
        pair=("b", 7),
        tags=frozenset({"p", "q"}),
        counts={1: "one", 3: "three"},
        anything={"free": [1, None, "text"]},
        flag=True,
    )

    assert dumps(other) == dumps(FULL)
    assert " " not in dumps(FULL)


def test_fields_of_a_newer_peer_are_accepted_and_dropped_at_any_depth() -> None:
    data = {"name": "x", "new": 1, "leaf": {"number": 1, "newer": {"deep": True}}}

    assert decode(Tree, data) == Tree(name=Incarnation("x"), leaf=Leaf(number=1))


def test_missing_fields_take_their_defaults() -> None:
    assert decode(Tree, {"name": "x"}) == Tree(name=Incarnation("x"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Tree.name: missing"),
        ({"name": "x", "leaf": {}}, "Tree.leaf.number: missing"),
        ({"name": "x", "leaves": [{"number": 1}, {}]}, r"Tree.leaves\[1\].number: missing"),
        ({"name": 1}, "Tree.name: expected str, got int"),
        ({"name": "x", "leaf": {"number": "1"}}, "Tree.leaf.number: expected int, got str"),
        ({"name": "x", "leaf": {"number": True}}, "Tree.leaf.number: expected int, got bool"),
        ({"name": "x", "leaf": {"number": 1.0}}, "Tree.leaf.number: expected int, got float"),
        ({"name": "x", "leaf": 3}, "Tree.leaf: expected an object, got int"),
        ({"name": "x", "leaves": {}}, "Tree.leaves: expected a list, got dict"),
        ({"name": "x", "pair": ["a"]}, "Tree.pair: expected 2 items, got 1"),
        ({"name": "x", "pair": ["a", "b"]}, r"Tree.pair\[1\]: expected int, got str"),
        ({"name": "x", "colour": "blue"}, "Tree.colour: 'blue' is not one of 'red'"),
        ({"name": "x", "counts": []}, "Tree.counts: expected an object, got list"),
        (
            {"name": "x", "counts": {"one": "1"}},
            "Tree.counts.one: expected integer keys, got 'one'",
        ),
        ({"name": "x", "counts": {"1": 1}}, "Tree.counts.'1': expected str, got int"),
        ({"name": "x", "flag": 1}, "Tree.flag: expected bool, got int"),
        ([], "Tree: expected an object, got list"),
    ],
)
def test_what_is_missing_or_wrong_is_named_by_its_path(data: Any, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        decode(Tree, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    pairs: tuple[Pair, ...]


def test_fields_that_contradict_each_other_are_named_by_the_path_of_what_holds_them() -> None:
    with pytest.raises(RemoteProtocolError, match=r"Pairs.pairs\[0\]: low is above high"):
        decode(Pairs, {"pairs": [{"low": 2, "high": 1}]})


def test_the_path_may_begin_where_the_value_was_found() -> None:
    with pytest.raises(RemoteProtocolError, match=r"body.plan.number: missing"):
        decode(Leaf, {}, "body.plan")


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="Leaf: not JSON"):
        loads(Leaf, text)


def test_a_whole_number_is_a_fine_ratio() -> None:
    leaf = decode(Leaf, {"number": 1, "ratio": 2})

    assert type(leaf.ratio) is float


def test_what_has_no_json_form_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="cannot encode object"):
        encode(object())


@given(
    number=st.integers(), ratio=st.floats(allow_nan=False), name=st.text(), tags=st.sets(st.text())
)
def test_every_number_and_text_comes_back_bit_by_bit(
    number: int, ratio: float, name: str, tags: set[str]
) -> None:
    tree = Tree(name=Incarnation(name), leaf=Leaf(number=number, ratio=ratio), tags=frozenset(tags))

    again = loads(Tree, dumps(tree))

    assert again == tree
    assert dumps(again) == dumps(tree)


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.booleans(),
    st.sampled_from([2**53, 2**53 + 1, -(2**63), 2**64, math.inf, -math.inf, math.nan, 1e308]),
)
OTHERS = st.one_of(st.none(), st.text(max_size=6), st.lists(st.integers(), max_size=2))


@given(
    kind=st.sampled_from([(Count, int), (CountOrNone, int), (Seconds, float), (Finite, float)]),
    data=NUMBERS | OTHERS,
)
def test_a_number_is_good_if_it_is_one_within_its_bound(kind: Any, data: Any) -> None:
    """However soon that is seen."""
    annotated, plain = kind
    (limit,) = annotated.__metadata__
    is_number = type(data) in (int, plain)
    with contextlib.suppress(OverflowError):
        if is_number and limit.problem_of(plain(data)) is None:
            found = decode(annotated, data)
            assert (found, type(found)) == (plain(data), plain)
            return
    with pytest.raises(MalformedError):
        decode(annotated, data)


SHORT = Annotated[str, Longest(4)]


@given(
    data=st.text(st.characters(), max_size=6) | st.sampled_from(["\ud800", "ab\udfff"]) | NUMBERS
)
def test_a_text_is_good_if_it_is_one_within_its_bound(data: Any) -> None:
    if isinstance(data, str) and len(data) <= 4 and is_utf8(data):
        assert decode(SHORT, data) == data
        return
    with pytest.raises(MalformedError):
        decode(SHORT, data)
