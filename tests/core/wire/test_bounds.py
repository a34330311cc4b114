"""Every value of a message has a bound in its type, and the codec holds it."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstay_core import snapshots, wire
from mainstay_core.base import bounds, codec
from mainstay_core.base.errors import MalformedError
from mainstay_core.wire.facts import Heartbeat, PodRegistration, TrainerDown, read_fact
from mainstay_core.wire.votes import Vote

MODULES = [
    "mainstay_core.segments.frames",
    *(f"mainstay_core.wire.{m.name}" for m in pkgutil.iter_modules(wire.__path__)),
    *(f"mainstay_core.snapshots.{m.name}" for m in pkgutil.iter_modules(snapshots.__path__)),
    "mainstay_core.base.ids",
    "mainstay_core.base.shape",
    "mainstay_core.dmr.findings",
    "mainstay_core.dmr.flips",
    "mainstay_core.faults.points",
    "mainstay_core.job.config",
    "mainstay_api.routes.agents",
    "mainstay_api.routes.faults",
    "mainstay_api.routes.jobs",
]
NOT_FROM_A_PEER = {
    "View": "made by the process that asks whether a fault is due",
    "Request": "what we send",
    "RecoveryList": "made of messages that were read",
    "Claim": "made of a file's name",
    "Judgement": "a decision of ours",
    "PrintedWindow": "the answer of an algorithm as a paper prints it",
    "CheckVerdict": "a decision of ours",
    "CoveredPod": "made of messages that were read",
    "_UnreadFacts": "each of its facts is then read by the type of its kind, which has the bounds",
    "_Reach": "a decision of ours",
    "_Copies": "an index of values that were read",
    "_Sent": "what a store has under way of what it keeps",
}


def messages() -> list[type]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for kind in vars(module).values():
            ours = inspect.isclass(kind) and kind.__module__ == name
            if ours and dataclasses.is_dataclass(kind):
                found[kind.__qualname__, name] = kind
    return [kind for (name, _), kind in sorted(found.items()) if name not in NOT_FROM_A_PEER]


def unbounded(kind: Any, path: str) -> Iterator[str]:
    """The paths below ``kind`` at which a value may be as large as its sender likes."""
    kind = getattr(kind, "__supertype__", kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        plain, *marks = args
        if any(isinstance(mark, bounds.Tree) for mark in marks):
            return
        if any(isinstance(mark, bounds.Bound) for mark in marks):
            inner = typing.get_origin(plain)
            if inner is not None:
                for arg in typing.get_args(plain):
                    yield from unbounded(arg, f"{path}[]")
            return
        yield from unbounded(plain, path)
    elif kind in (int, float, str, Any, dict, list):
        yield f"{path}: {kind}"
    elif origin in (Union, types.UnionType):
        for arg in args:
            yield from unbounded(arg, path)
    elif origin is Literal or kind in (bool, type(None), Ellipsis):
        return
    elif origin in (tuple, list, frozenset) and Ellipsis not in args and origin is tuple:
        for arg in args:
            yield from unbounded(arg, f"{path}[]")
    elif origin is not None or not (dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum)):
        yield f"{path}: {kind}"


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_has_a_bound(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    found = [
        line
        for field in dataclasses.fields(kind)
        for line in unbounded(hints[field.name], f"{kind.__name__}.{field.name}")
        if not (kind.__name__ in {"Facts", "PoolFacts"} and "ToldFact" in line)
    ]
    assert not found, "\n".join(found)


def test_the_walk_finds_a_field_without_a_bound():
    @dataclasses.dataclass
    class Loose:
        text: str
        items: tuple[bounds.Name, ...]
        good: Annotated[tuple[bounds.Name, ...], bounds.Longest(2)] | None
        half: Annotated[dict[str, bounds.Count], bounds.Longest(2)]

    hints = typing.get_type_hints(Loose, localns=locals() | globals(), include_extras=True)
    found = [line for name, hint in hints.items() for line in unbounded(hint, name)]
    assert [line.partition(":")[0] for line in found] == ["text", "items", "half[]"]


BEAT = {"pod": "p", "slots": [{"index": 0}]}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"pod": "x" * 513}, "Heartbeat.pod"),
        ({"pod": "\ud800"}, "Heartbeat.pod"),
        ({"slots": [{"index": -1}]}, "Heartbeat.slots[0].index"),
        ({"slots": [{"index": 10**9}]}, "Heartbeat.slots[0].index"),
        ({"slots": [{"index": 10**5000}]}, "Heartbeat.slots[0].index"),
        ({"slots": [{"index": 0}] * 1025}, "Heartbeat.slots"),
        ({"slots": [{"index": 0, "quorum": {"id": -1, "nonce": ""}}]}, "Heartbeat.slots[0].quorum"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_its_path(change, where):
    with pytest.raises(MalformedError) as refused:
        codec.decode(Heartbeat, BEAT | change)
    assert refused.value.field.startswith(where)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_time_is_a_finite_number(text):
    told = f'{{"kind": "pod-gone", "pod": "p", "format": 2, "observed_at_s": {text}}}'
    with pytest.raises(MalformedError, match=r"observed_at_s: .* is not a finite number"):
        read_fact(json.loads(told))


def test_a_norm_may_be_no_number_since_the_votes_judge_it():
    hint = typing.get_type_hints(Vote, include_extras=True)["norms_sq"]
    (found,) = codec.decode(
        Annotated[tuple[bounds.AnyFloat, ...], bounds.Longest(3)], [float("nan")]
    )
    assert found != found
    assert hint == Annotated[tuple[bounds.AnyFloat, ...], bounds.Longest(bounds.MAX_BLOCKS)]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\xff", b"\xff\xfe"]
)
def test_text_that_is_no_message_is_refused(text):
    with pytest.raises(MalformedError):
        codec.loads(Heartbeat, text)


def test_a_registration_has_at_least_one_slot():
    with pytest.raises(MalformedError, match="num_slots"):
        codec.decode(
            PodRegistration,
            {"pod": "p", "name": "p", "address": "", "gather": "", "num_slots": 0},
        )


def test_a_long_text_for_people_is_cut_where_it_is_made():
    fact = TrainerDown(
        pod="p", slot=0, incarnation="i", evidence="a" * 9000 + "\ud800" + "z" * 9000
    )
    assert len(fact.evidence) <= bounds.MAX_SENTENCE
    assert fact.evidence.startswith("aaa")
    assert fact.evidence.endswith("zzz")
    assert read_fact(json.loads(codec.dumps(fact))) == fact


documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    inner = [*value, *value.values()] if isinstance(value, Mapping) else value
    return 1 + max(map(depth_of, inner), default=0) if isinstance(inner, list) else 1


def leaves(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)


@given(documents, st.integers(1, 5), st.integers(1, 12))
def test_a_document_is_judged_as_a_simple_walk_does(value, depth, nodes):
    def good(leaf: Any) -> bool:
        if isinstance(leaf, str):
            return not any(0xD800 <= ord(c) <= 0xDFFF for c in leaf)
        if isinstance(leaf, float):
            return leaf - leaf == 0
        return not isinstance(leaf, int) or -(2**64) < leaf < 2**64

    expected = (
        depth_of(value) <= depth
        and len(list(leaves(value))) <= nodes
        and all(map(good, leaves(value)))
    )
    assert (bounds.Tree(depth, nodes).problem_of(value) is None) == expected
