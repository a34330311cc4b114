"""Plays a pipeline in which flows take several routes, and so finds an order of work for each rank.

1F1B gives each stage a fixed pattern. That works since all flows pass the stages in one order.
Here they do not, so the pipeline is played once, in whole units of time, with all its ranks. A rank
that is free takes the most urgent work that is ready. The order in which it did so is its program.

*No order deadlocks.* All events of the play stand in one line: each transfer happens at one moment,
for its sender and its receiver alike. A rank hands transfers to its communicator in that line's
order. So the first transfer of the line that is not over yet can always happen: whatever comes
before it at either end is over. That holds even where a transfer takes both ends at once, and
transfers of a rank run one after the other.

*What is under way is bounded.* A flow begins only while fewer than ``window`` flows are under way,
from their first forward to their last weight gradient in any stage. Nothing else holds a flow up
for ever, as the oldest flow under way waits for none that is younger.

*Gradients add up in one order.* On each rank the weight gradients of flows follow each other in
the flows' order, and those of a flow's two visits in the order of the backward. Input gradients do
not wait for that: they go back as soon as they can. Flows also come to the head, where losses add
up, in their order.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from mainstay_core.planning.routes import Extent, Route

SHORT = frozenset({Extent.EMBEDDING, Extent.HEAD})
LAYERS_UNITS, ENDS_UNITS = 8, 1
"""How long each kind of work takes with layers, and without. Only the order follows from that."""


class Kind(enum.IntEnum):
    """Kinds of work, the most urgent first."""

    BACKWARD_INPUT = 0
    BACKWARD_WEIGHT = 1
    FORWARD = 2


class Work(NamedTuple):
    """Something to compute."""

    kind: Kind
    flow: int
    """Place in the list of flows."""
    visit: int
    """Place on the flow's route."""


class Transfer(NamedTuple):
    """One end of a transfer."""

    sends: bool
    forward: bool
    flow: int
    visit: int
    """Of this end."""
    is_busy: bool
    """Whether this end computes meanwhile what stands before it in the line."""


Line = list[Work | Transfer]
"""What a rank does, in order: work when it begins, transfers when they happen."""


def play(routes: Sequence[Route], num_stages: int, window: int) -> list[Line]:
    """Return what each stage does, in order.

    Complexity: O(n log n) in the visits of all flows together.

    Args:
        routes: of the flows, in their order.
        num_stages: stages of the chain.
        window: flows that may be under way at once, at least 1.
    """
    return _Play(routes, num_stages, window).run()


class _Play:
    def __init__(self, routes: Sequence[Route], num_stages: int, window: int) -> None:
        self._routes, self._window = routes, window
        stages = range(num_stages)
        self._lines: list[Line] = [[] for _ in stages]
        self._ready: list[list[tuple[int, int, int]]] = [[] for _ in stages]
        """Work that could begin, by urgency: (kind, flow, -visit)."""
        self._is_busy = [False] * num_stages
        self._under_way: list[tuple[int, int, Work]] = []
        """(end, stage, work) of what is computed now."""
        self._num_begun = self._num_open = 0
        self._weights: list[list[tuple[int, int]]] = [[] for _ in stages]
        """(flow, visit) in the order in which weight gradients are added, reversed."""
        for flow in reversed(range(len(routes))):
            for visit, (stage, _) in enumerate(routes[flow]):
                self._weights[stage].append((flow, visit))
        self._has_input: set[tuple[int, int]] = set()
        """Visits whose input gradient is there, and whose weights' gradients are not."""
        self._num_left = [len(route) for route in routes]
        """Visits of a flow whose weights have no gradients yet."""
        self._at_head: set[int] = set()
        self._next_head = 0

    def run(self) -> list[Line]:
        self._begin(0)
        while self._under_way:
            now = self._under_way[0][0]
            while self._under_way and self._under_way[0][0] == now:
                _, stage, work = heapq.heappop(self._under_way)
                self._is_busy[stage] = False
                self._end(stage, work)
            self._begin(now)
        assert not any(self._num_left), "the oldest flow can always go on"
        return self._lines

    def _begin(self, now: int) -> None:
        while self._num_begun < len(self._routes) and self._num_open < self._window:
            self._reach(self._num_begun, 0)
            self._num_begun += 1
            self._num_open += 1
        for stage, ready in enumerate(self._ready):
            if ready and not self._is_busy[stage]:
                kind, flow, visit = heapq.heappop(ready)
                work = Work(Kind(kind), flow, -visit)
                self._lines[stage].append(work)
                self._is_busy[stage] = True
                is_short = self._routes[flow][work.visit].extent in SHORT
                end = now + (ENDS_UNITS if is_short else LAYERS_UNITS)
                heapq.heappush(self._under_way, (end, stage, work))

    def _end(self, stage: int, work: Work) -> None:
        _, flow, visit = work
        if work.kind is Kind.FORWARD:
            if visit == len(self._routes[flow]) - 1:
                self._make_ready(stage, Kind.BACKWARD_INPUT, flow, visit)
                return
            self._transfer(flow, visit, visit + 1, forward=True)
            self._reach(flow, visit + 1)
        elif work.kind is Kind.BACKWARD_INPUT:
            self._has_input.add((flow, visit))
            self._release_weights(stage)
            if visit:
                self._transfer(flow, visit, visit - 1, forward=False)
                before = self._routes[flow][visit - 1].stage
                self._make_ready(before, Kind.BACKWARD_INPUT, flow, visit - 1)
        else:
            self._num_left[flow] -= 1
            self._num_open -= not self._num_left[flow]

    def _reach(self, flow: int, visit: int) -> None:
        """A flow has come to a stage on its way forward."""
        if visit < len(self._routes[flow]) - 1:
            self._make_ready(self._routes[flow][visit].stage, Kind.FORWARD, flow, visit)
            return
        self._at_head.add(flow)
        while self._next_head in self._at_head:
            flow = self._next_head
            last = len(self._routes[flow]) - 1
            self._make_ready(self._routes[flow][last].stage, Kind.FORWARD, flow, last)
            self._next_head += 1

    def _release_weights(self, stage: int) -> None:
        later = self._weights[stage]
        while later and later[-1] in self._has_input:
            flow, visit = later.pop()
            self._has_input.remove((flow, visit))
            self._make_ready(stage, Kind.BACKWARD_WEIGHT, flow, visit)

    def _make_ready(self, stage: int, kind: Kind, flow: int, visit: int) -> None:
        heapq.heappush(self._ready[stage], (kind, flow, -visit))

    def _transfer(self, flow: int, source: int, target: int, *, forward: bool) -> None:
        route = self._routes[flow]
        for visit, sends in ((source, True), (target, False)):
            stage = route[visit].stage
            end = Transfer(sends, forward, flow, visit, self._is_busy[stage])
            self._lines[stage].append(end)
