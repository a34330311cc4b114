"""Bounds of values from the wire, as parts of their types.

A field of a message is annotated with one of the types below. :mod:`mainstay_core.base.codec` and
the api's validation both refuse what lies outside, by the path of the field, before any decision
sees it. A test walks the types of all messages and refuses a field without a bound.

The bounds are wide: they tell mistakes and attacks from jobs, not large jobs from small ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

MAX_COUNT = 2**53
"""Of a count: what each JSON reader keeps exactly."""
MAX_MEMBERS = 65_536
"""Members of a plan: ranks of all replicas and followers together."""
MAX_SLOTS_PER_POD = 1024
"""Accelerators of one pod."""
MAX_TYPES = 1 << 20
"""Shard types of a step."""
MAX_FLOWS = 65_536
"""Micro-batches of a shard type."""
MAX_DOUBTED = 64
"""Accounts of a type on which chains disagree, in a settle report."""
MAX_EXCHANGES = 65_536
"""Collectives of a cell in one pass of a micro-batch, of which a rank tells."""
MAX_BLOCKS = 65_536
"""Blocks of a stage."""
MAX_HOSTS = 28
"""Hosts of a shard type: as many marks as the longest Golomb ruler has that is known."""
MAX_STATISTICS = 1 << 20
"""Integers that a model counts in a step."""
MAX_BUCKET_BYTES = 1 << 30
"""Of a gradient, reduced at a time. Larger ones win nothing: little is left to overlap with."""
MAX_COPY_BYTES = 1 << 40
"""Of a state, in host memory at a time while a checkpoint is written: more than a machine has."""
MIN_COPY_BYTES = 8 << 20
"""The least for that: two chunks, of which one is written while the other is copied."""
MAX_AT_ONCE = 10_000
"""Facts that a provider tells in one request: as many pods may be gone at once."""
MAX_TOLD = 1024
"""Facts, or entries of the ledger, that a supervisor tells in one request. Ours tells 256."""
MAX_NAME = 512
"""Characters of a name."""
MAX_FAULTS = 10_000
"""Injected faults of a job."""
MAX_SENTENCE = 8192
"""Characters of a text for people. Longer ones are cut where they are made."""
MAX_DEPTH = 64
"""Nesting of a document of the user."""
MAX_NODES = 200_000
"""Values in a document of the user."""


@dataclass(frozen=True, slots=True)
class Range:
    """A bound on a number, both ends included. A float must be finite, too."""

    low: float
    high: float

    def problem_of(self, value: Any) -> str | None:
        """Return what is wrong with a number; None if it is good."""
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} is not a finite number"
        if not self.low <= value <= self.high:
            return f"{_brief(value)} is not between {self.low} and {self.high}"
        return None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = {**handler(source), "ge": self.low, "le": self.high}
        return schema | ({"allow_inf_nan": False} if schema["type"] == "float" else {})


@dataclass(frozen=True, slots=True)
class Longest:
    """A bound on the length of a text, a list or an object. A text must be UTF-8, too."""

    length: int

    def problem_of(self, value: Any) -> str | None:
        """Return what is wrong with a text, a list or an object; None if it is good."""
        if len(value) > self.length:
            return f"has a length of {len(value)}, more than {self.length}"
        if isinstance(value, str) and not is_utf8(value):
            return "is no text: it contains half of a surrogate pair"
        return None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        schema = handler(source)
        if schema["type"] == "tuple":
            # Checked before the items are, which a list that is too long must not cost.
            return {**schema, "max_length": self.length, "fail_fast": True}
        return {**schema, "max_length": self.length}


@dataclass(frozen=True, slots=True)
class AnyNumber:
    """Marks a float that may be infinite or no number: who gets it judges it."""

    def problem_of(self, value: Any) -> str | None:
        """Return None: nothing is wrong with any float."""
        del value
        return None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler(source)


@dataclass(frozen=True, slots=True)
class Tree:
    """A bound on a document of the user: JSON of any shape, but of a bounded size."""

    depth: int = MAX_DEPTH
    nodes: int = MAX_NODES

    def problem_of(self, value: Any) -> str | None:
        """Return what is wrong with a document; None if it is good."""
        left, stack = self.nodes, [(value, 1)]
        while stack:
            node, depth = stack.pop()
            left -= 1
            if left < 0:
                return f"has more than {self.nodes} values"
            if depth > self.depth:
                return f"is nested deeper than {self.depth}"
            if isinstance(node, Mapping):
                stack += [(key, depth + 1) for key in node]
                stack += [(item, depth + 1) for item in node.values()]
            elif isinstance(node, list | tuple):
                stack += [(item, depth + 1) for item in node]
            elif isinstance(node, str) and not is_utf8(node):
                return "contains a text with half of a surrogate pair"
            elif isinstance(node, float) and not math.isfinite(node):
                return f"contains {node}, which is not a finite number"
            elif isinstance(node, int) and node.bit_length() > 64:
                return "contains an integer of more than 64 bits"
        return None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def check(value: Any) -> Any:
            problem = self.problem_of(value)
            if problem is not None:
                raise ValueError(problem)
            return value

        schema = {"type": "function-before", "schema": handler(source)}
        return {**schema, "function": {"type": "no-info", "function": check}}


Bound = Range | Longest | AnyNumber | Tree

Name = Annotated[str, Longest(MAX_NAME)]
"""Names, uids, addresses, paths of blocks: what a program compares."""
Address = Annotated[str, Longest(2048)]
"""One or several host:port or urls."""
Digest = Annotated[str, Longest(256)]
"""A digest, as text."""
Sentence = Annotated[str, Longest(MAX_SENTENCE)]
"""A text for people."""
Text = Annotated[str, Longest(1 << 20)]
"""A text of the user, e.g. an argument of the program."""

Count = Annotated[int, Range(0, MAX_COUNT)]
"""How many, or a number that only grows: steps, versions, tokens, ids of quorums, bytes."""
CountOrNone = Annotated[int, Range(-1, MAX_COUNT)]
"""A count, or -1 for none."""
Signed = Annotated[int, Range(-(2**63), 2**64 - 1)]
"""Any integer of a machine, e.g. a seed."""
Index = Annotated[int, Range(0, MAX_MEMBERS)]
"""The place of something in a job: a member, a replica, a stage, an inner rank."""
SlotIndex = Annotated[int, Range(0, MAX_SLOTS_PER_POD)]
"""The place of an accelerator in its pod."""
TypeIndex = Annotated[int, Range(0, MAX_TYPES)]
"""A shard type, or a place in a lane."""

Seconds = Annotated[float, Range(0.0, 1e10)]
"""A duration."""
Instant = Annotated[float, Range(-1e12, 1e12)]
"""A wall clock's time, in seconds since 1970."""
Finite = Annotated[float, Range(-1.7976931348623157e308, 1.7976931348623157e308)]
"""Any finite number."""
AnyFloat = Annotated[float, AnyNumber()]
"""Any float, infinities and no number included."""

Document = Annotated[dict[str, Any], Tree()]
"""A document of the user: JSON of any shape."""
Labels = Annotated[dict[Name, Text], Longest(4096)]
"""Texts by name."""


def is_utf8(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it contains no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def cut(text: str, longest: int = MAX_SENTENCE) -> str:
    """Return a text for people that is within the bound of a :data:`Sentence`.

    What cannot be written as UTF-8 is replaced. Of a long text the beginning and the end stay.
    """
    if not is_utf8(text):
        text = text.encode(errors="replace").decode()
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def cut_fields(value: object, *names: str) -> None:
    """Cut texts for people in a frozen value that is being made, so that a peer accepts it."""
    for name in names:
        object.__setattr__(value, name, cut(getattr(value, name)))


def _brief(value: Any) -> str:
    """Return a number as text; of one with thousands of digits only its size is told."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
