"""Describes the profile of a stage: what planners of checks know, read from and written to JSON.

A profile tells of one passage of a micro-batch through a stage: the operators in the order of their
first execution, which of them activation checkpointing (AC) recomputes, and the *windows*, in which
the stage waits (SpareTrain, section 4). It carries the fingerprint of the job, so that a plan made
from it is used by that job alone.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from mainstay_core.base import codec
from mainstay_core.base.bounds import Count, Digest, Index, Longest, Name, Range, Seconds
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.base.words import quote
from mainstay_core.dmr.operators import (
    MAX_BLOCK_OPERATORS,
    MAX_OPERATORS,
    MAX_TENSORS,
    Graph,
    Operator,
    OperatorNames,
    Pass,
    Tensor,
    TensorNames,
)

PROFILE_KIND = "mainstay-dmr-profile"
MAX_WINDOWS = 65_536
"""Windows of a profile."""
WHOLE_WAY = "whole"
"""The way of micro-batches that pass a stage once, through all of it."""

Place = Annotated[int, Range(0, MAX_OPERATORS)]
"""A number of operators executed before."""


class WindowKind(enum.StrEnum):
    """The part of the network that a stage waits for in a window."""

    INTER = "inter"
    """Other stages or other replicas."""
    INTRA = "intra"
    """Inner ranks of the same cell, inside a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A wait, in which the device computes nothing unless checks use it."""

    name: Name
    after: Place
    """Operators whose first execution is over when it opens."""
    kind: WindowKind
    median_s: Seconds
    least_s: Seconds
    """The shortest that was seen."""
    static: bool = True
    """Whether its length is known beforehand: it waits for the same bytes in every step."""
    headroom_bytes: Count
    """Memory beyond the peak from the stage before it to its end, in the fullest step seen."""

    @property
    def usable_s(self) -> float:
        """Return the seconds that a plan made beforehand may use: the least if it varies."""
        return self.median_s if self.static else self.least_s

    @property
    def gathers(self) -> bool:
        """Return whether a check may communicate in it.

        All inner ranks must then run the check at the same point. A window of unknown length, whose
        checks depend on when it ends, has none. In a wait for inner ranks their link is taken.
        """
        return self.static and self.kind is WindowKind.INTER


@dataclass(frozen=True, slots=True, kw_only=True)
class AcSegment:
    """Forward operators that AC recomputes together in the backward pass of their block."""

    name: Name
    operators: OperatorNames
    """In order of execution."""
    kept: OperatorNames
    """Its last operators, whose outputs stay in memory, so that they are not recomputed. None if
    the whole segment runs again."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that planners of checks know of a stage.

    Invariant: :attr:`graph` can be made of it, and every name in it is known.
    """

    kind: Literal["mainstay-dmr-profile"] = "mainstay-dmr-profile"
    format: Literal[1] = 1
    fingerprint: Digest
    """The job's: what its bits depend on."""
    stage: Index
    budget_bytes: Count
    """The most that checks may retain at any time."""
    tensors: Annotated[tuple[Tensor, ...], Longest(MAX_TENSORS)]
    operators: Annotated[tuple[Operator, ...], Longest(MAX_OPERATORS)]
    """In the order of their first execution."""
    results: TensorNames
    """Tensors that are a gradient or state, or leave the stage."""
    ac_segments: Annotated[tuple[AcSegment, ...], Longest(MAX_OPERATORS)] = ()
    windows: Annotated[tuple[Window, ...], Longest(MAX_WINDOWS)] = ()
    """In the order in which they open."""
    way: Name = field(default=WHOLE_WAY, metadata=codec.OMITTED)
    """The parts of the stage through which the micro-batch passes, e.g. ``layers-head``: in a
    swapped pipeline half of them pass a stage at an end twice."""

    def __post_init__(self) -> None:
        self._check_blocks()
        self._check_results()
        self._check_windows()
        taken: dict[str, str] = {}
        names = set()
        for number, segment in enumerate(self.ac_segments):
            field = f"ac_segments[{number}]"
            if segment.name in names:
                raise InvalidSpecError(f"{field}.name", f"{quote(segment.name)} is there twice")
            names.add(segment.name)
            self._check_segment(field, segment)
            for name in segment.operators:
                if name in taken:
                    raise InvalidSpecError(
                        f"{field}.operators", f"{name} is in {taken[name]} already"
                    )
                taken[name] = segment.name

    @cached_property
    def graph(self) -> Graph:
        """Return the graph of all operators."""
        return Graph(self.tensors, self.operators)

    @cached_property
    def reaching(self) -> frozenset[int]:
        """Return the places of operators whose work can reach a gradient or the state."""
        return self.graph.find_reaching(self.results)

    @cached_property
    def recomputed_at(self) -> dict[int, int]:
        """Return, of each operator that AC recomputes, the place before which that happens.

        In the order of the operators.
        """
        places = self.graph.places
        found = {}
        for segment in self.ac_segments:
            at = self._recompute_place(segment)
            for name in segment.operators:
                if name not in segment.kept:
                    found[places[name]] = at
        return dict(sorted(found.items()))

    @cached_property
    def recomputed_together(self) -> frozenset[tuple[str, ...]]:
        """Return the operators of each AC segment."""
        return frozenset(segment.operators for segment in self.ac_segments)

    @cached_property
    def window_of(self) -> dict[str, Window]:
        """Return the windows by name."""
        return {window.name: window for window in self.windows}

    def _recompute_place(self, segment: AcSegment) -> int:
        """Return the place of the first operator of the block that is none of its forward."""
        graph = self.graph
        block = graph.operators[graph.places[segment.operators[0]]].block
        for place in graph.blocks[block]:
            if graph.operators[place].in_pass is not Pass.FORWARD:
                return place
        raise InvalidSpecError(
            f"ac_segments.{segment.name}", f"block {block} has no backward that would recompute it"
        )

    def _check_blocks(self) -> None:
        for block, places in self.graph.blocks.items():
            if len(places) > MAX_BLOCK_OPERATORS:
                place = places[MAX_BLOCK_OPERATORS]
                raise InvalidSpecError(
                    f"operators[{place}].block",
                    f"block {block} has {len(places)} operators besides those of the step, must "
                    f"have at most {MAX_BLOCK_OPERATORS}; tell some of them as another block",
                )

    def _check_results(self) -> None:
        for number, name in enumerate(self.results):
            if name not in self.graph.tensors:
                raise InvalidSpecError(f"results[{number}]", f"{quote(name)} is not in tensors")
            by = self.graph.overwriters.get(name)
            if by is not None:
                raise InvalidSpecError(
                    f"results[{number}]",
                    f"{name} is overwritten by {self.graph.operators[by].id}; name what is there "
                    "at the end instead",
                )

    def _check_windows(self) -> None:
        before, names = 0, set()
        for number, window in enumerate(self.windows):
            field = f"windows[{number}]"
            if window.name in names:
                raise InvalidSpecError(f"{field}.name", f"{quote(window.name)} is there twice")
            if not before <= window.after <= len(self.operators):
                raise InvalidSpecError(
                    f"{field}.after",
                    f"is {window.after}, must be between {before} (the window before) and "
                    f"{len(self.operators)} (the operators)",
                )
            if window.least_s > window.median_s:
                raise InvalidSpecError(
                    f"{field}.least_s", f"is {window.least_s}, more than median_s {window.median_s}"
                )
            before = window.after
            names.add(window.name)

    def _check_segment(self, field: str, segment: AcSegment) -> None:
        places = []
        for name in segment.operators:
            place = self.graph.places.get(name)
            if place is None:
                raise InvalidSpecError(f"{field}.operators", f"{quote(name)} is not in operators")
            if self.operators[place].in_pass is not Pass.FORWARD:
                raise InvalidSpecError(f"{field}.operators", f"{name} is not of a forward pass")
            places.append(place)
        if places != sorted(set(places)):
            raise InvalidSpecError(f"{field}.operators", "are not in the order of execution")
        if len({self.operators[place].block for place in places}) > 1:
            raise InvalidSpecError(f"{field}.operators", "are of several blocks")
        again = [name for name in segment.operators if name not in segment.kept]
        if not again or not set(segment.kept) <= set(segment.operators):
            raise InvalidSpecError(f"{field}.kept", "must be some of its operators, and not all")
        self._check_recompute(field, segment, again)

    def _check_recompute(self, field: str, segment: AcSegment, again: list[str]) -> None:
        graph, at = self.graph, self._recompute_place(segment)
        made_by_kept = {
            tensor
            for name in segment.kept
            for tensor in graph.operators[graph.places[name]].outputs
        }
        for name in again:
            for tensor in graph.operators[graph.places[name]].inputs:
                if tensor in made_by_kept:
                    raise InvalidSpecError(
                        f"{field}.kept", f"{name} is recomputed from {tensor}, which is not"
                    )
        places = [graph.places[name] for name in segment.operators]
        if places[-1] >= at:
            raise InvalidSpecError(
                f"{field}.operators",
                f"{segment.operators[-1]} is executed after {graph.operators[at].id}, before which "
                "the segment is recomputed",
            )
        # The kept ones, too: a check executes them again behind the recompute.
        for tensor in graph.outer_inputs(places):
            by = graph.overwriters.get(tensor)
            if by is not None and by < at:
                raise InvalidSpecError(
                    f"{field}.operators",
                    f"are executed again from {tensor}, which {graph.operators[by].id} has "
                    "overwritten by then; leave the kept operator that reads it out of the segment",
                )


def read_profile(text: str | bytes) -> Profile:
    """Return the profile that a file describes.

    Args:
        text: JSON.

    Raises:
        InvalidSpecError: it is no JSON (a torn file), no profile, of another format, or a field is
            missing, unfit or out of its bounds; the field is named.
    """
    try:
        data = codec.parse_json(text, "profile")
        check_kind(data, "profile", PROFILE_KIND)
        return codec.decode(Profile, data, "profile")
    except MalformedError as error:
        raise InvalidSpecError(error.field, error.problem) from error


def check_kind(data: object, what: str, kind: str) -> None:
    """Refuse JSON that is of another kind of file, before its fields are looked at.

    Raises:
        InvalidSpecError: it says no kind, or another one.
    """
    told = data.get("kind") if isinstance(data, dict) else None
    if told != kind:
        raise InvalidSpecError(
            f"{what}.kind", f"is {quote(told)}, must be {quote(kind)}: this is another kind of file"
        )
