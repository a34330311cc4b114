"""Flows that take two routes: which, in what order of work, and that no chain can block itself."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Order, most_flows_under_way
from mainstay_core.planning.program import Action, Op, Receive, closing, compile_compute
from mainstay_core.planning.routes import Extent, Route, Visit, route_of

WHOLE, EMBEDDING, LAYERS, HEAD = Extent
Flow = tuple[int, int]


def swapped(types: Sequence[int], micro_batches: int, num_stages: int) -> list[tuple[Action, ...]]:
    return [
        compile_compute(types, micro_batches, stage, num_stages, Order.SWAPPED)
        for stage in range(num_stages)
    ]


def route(number: int, num_stages: int) -> Route:
    return route_of(Order.SWAPPED, number, num_stages)


def test_half_of_the_flows_swap_both_ends() -> None:
    for num_stages in range(4, 9):
        n = num_stages - 1
        middle = [Visit(stage, WHOLE) for stage in range(2, n - 1)]
        assert route(6, num_stages) == tuple(Visit(stage, WHOLE) for stage in range(num_stages))
        assert route(7, num_stages) == (
            Visit(0, EMBEDDING),
            Visit(1, WHOLE),
            Visit(0, LAYERS),
            *middle,
            Visit(n, LAYERS),
            Visit(n - 1, WHOLE),
            Visit(n, HEAD),
        )


def test_with_three_stages_flows_take_turns_at_the_two_ends() -> None:
    assert route(1, 3) == (
        Visit(0, EMBEDDING),
        Visit(1, WHOLE),
        Visit(0, LAYERS),
        Visit(2, WHOLE),
    )
    assert route(2, 3) == (Visit(0, WHOLE), Visit(2, LAYERS), Visit(1, WHOLE), Visit(2, HEAD))


def test_two_stages_are_one_pair() -> None:
    assert route(0, 2) == (Visit(0, WHOLE), Visit(1, WHOLE))
    assert route(3, 2) == (
        Visit(0, EMBEDDING),
        Visit(1, LAYERS),
        Visit(0, LAYERS),
        Visit(1, HEAD),
    )


def test_one_stage_has_nothing_to_swap() -> None:
    with pytest.raises(InvalidSpecError, match="takes two stages or more"):
        route(0, 1)


def test_the_route_follows_from_type_and_micro_batch_whoever_computes_it() -> None:
    for types in ([0, 1, 2, 3], [3], [2, 1], [3, 0, 1]):
        for stage, program in enumerate(swapped(types, 3, 4)):
            for action in program:
                number = action.type * 3 + action.micro_batch
                assert route(number, 4)[action.visit] == Visit(stage, action.extent)


# What a rank does ------------------------------------------------------------------------------


def flows_of(program: Sequence[Action], op: Op) -> list[tuple[int, int, int]]:
    return [(a.type, a.micro_batch, a.visit) for a in program if a.op is op]


SIZES = [*itertools.product(range(2, 9), (1, 2, 3, 8, 32))]


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_each_visit_is_computed_once_and_weights_get_gradients_in_the_flows_order(
    num_stages: int, micro_batches: int
) -> None:
    types = [5, 2]
    flows = [(t, m) for t in types for m in range(micro_batches)]
    routes = {(t, m): route(t * micro_batches + m, num_stages) for t, m in flows}
    for stage, program in enumerate(swapped(types, micro_batches, num_stages)):
        visits = [
            (*flow, visit)
            for flow in flows
            for visit in reversed(range(len(routes[flow])))
            if routes[flow][visit].stage == stage
        ]
        assert flows_of(program, Op.BACKWARD_WEIGHT) == visits
        for op in (Op.FORWARD, Op.BACKWARD_INPUT):
            assert sorted(flows_of(program, op)) == sorted(visits)
        assert closing(program) == ()
    heads = [
        a
        for a in swapped(types, micro_batches, num_stages)[-1]
        if a.op is Op.FORWARD and a.visit == len(routes[a.type, a.micro_batch]) - 1
    ]
    assert [(a.type, a.micro_batch) for a in heads] == flows, "losses are added in this order"


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_a_rank_holds_activations_of_a_bounded_number_of_flows(
    num_stages: int, micro_batches: int
) -> None:
    for stage, program in enumerate(swapped([0, 1, 3], micro_batches, num_stages)):
        bound = most_flows_under_way(Order.SWAPPED, stage, num_stages)
        held: set[tuple[int, int, int]] = set()
        arriving: set[tuple[int, int, int]] = set()
        for action in program:
            arriving |= {(r.type, r.micro_batch, r.visit) for r in action.starts}
            at = action.type, action.micro_batch, action.visit
            if action.op in (Op.RECV_F, Op.RECV_B):
                arriving.remove(at)
            if action.op is Op.FORWARD:
                held.add(at)
            if action.op is Op.BACKWARD_WEIGHT:
                held.remove(at)
            assert len({flow[:2] for flow in held | arriving}) <= bound
            assert len(arriving) <= bound
        assert not held
        assert not arriving


# The transport ---------------------------------------------------------------------------------

SENT_AS = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
Leg = tuple[bool, int, tuple[Op, int, int]]
"""Whether it sends, the peer's stage, and what: as it was sent, with its flow."""


class Rank:
    """One rank on a transport without buffers, whose operations run one after the other."""

    def __init__(self, stage: int, program: Sequence[Action]) -> None:
        self.stage, self.later = stage, deque(program)
        self.queue: deque[Leg] = deque()
        self.came: set[tuple[Op, int, int, int]] = set()
        """Receives that are over and not waited for yet: operation, flow and peer."""

    def _start(self, receive: Receive) -> None:
        what = SENT_AS[receive.op], receive.type, receive.micro_batch
        self.queue.append((False, receive.peer, what))

    def advance(self) -> bool:
        """Take the next action, unless it waits; return whether it was taken."""
        if not self.later:
            return False
        action = self.later[0]
        if action.starts:
            for receive in action.starts:
                self._start(receive)
            self.later[0] = Action(
                action.op,
                action.stage,
                action.type,
                action.micro_batch,
                peer=action.peer,
                visit=action.visit,
            )
            return True
        what = action.op, action.type, action.micro_batch
        if action.op in SENT_AS:
            key = (SENT_AS[action.op], *what[1:], action.peer)
            if key not in self.came:
                return False
            self.came.remove(key)
        elif action.op in (Op.SEND_F, Op.SEND_B):
            self.queue.append((True, action.peer, what))
        self.later.popleft()
        return True


def run_strictly(programs: Sequence[Sequence[Action]], rng: random.Random) -> None:
    """Run a chain. Nothing but the order at both ends says which receive belongs to which send."""
    ranks = [Rank(stage, program) for stage, program in enumerate(programs)]
    while any(rank.later or rank.queue for rank in ranks):
        moved = False
        for rank in rng.sample(ranks, len(ranks)):
            for _ in range(rng.randint(1, 5)):
                moved |= rank.advance()
        for rank in rng.sample(ranks, len(ranks)):
            moved |= transfer(rank, ranks)
        assert moved, f"every stage waits: {[list(rank.later)[:1] for rank in ranks]}"


def transfer(rank: Rank, ranks: Sequence[Rank]) -> bool:
    """Have the first operation of a rank happen, if its peer is at the other end of it."""
    if not rank.queue or not rank.queue[0][0]:
        return False
    _, peer, what = rank.queue[0]
    other = ranks[peer]
    if not other.queue or other.queue[0][:2] != (False, rank.stage):
        return False
    assert other.queue[0][2] == what, f"{what} would be taken for {other.queue[0][2]}"
    rank.queue.popleft()
    other.queue.popleft()
    other.came.add((*what, rank.stage))
    return True


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_no_chain_blocks_itself_on_a_transport_without_buffers(num_stages: int) -> None:
    rng = random.Random(num_stages)
    for micro_batches in range(1, 33):
        run_strictly(swapped([0], micro_batches, num_stages), rng)


def test_patches_do_not_block_on_a_transport_without_buffers() -> None:
    rng = random.Random(7)
    for _ in range(150):
        num_stages, micro_batches = rng.randint(2, 8), rng.randint(1, 5)
        types = rng.sample(range(24), rng.randint(1, 6))

        run_strictly(swapped(types, micro_batches, num_stages), rng)


def test_receives_that_begin_where_they_are_waited_for_can_block() -> None:
    """The transport of these tests is strict: it finds programs that are wrong."""
    blocked = 0
    for num_stages in range(2, 9):
        programs = [list(map(starting_late, p)) for p in swapped([0, 1], 8, num_stages)]
        try:
            run_strictly(programs, random.Random(1))
        except AssertionError:
            blocked += 1
    assert blocked


def starting_late(action: Action) -> Action:
    at = action.op, action.type, action.micro_batch, action.visit, action.peer
    starts = (Receive(*at),) if action.op in SENT_AS else ()
    return Action(*at[:1], action.stage, *at[1:3], visit=at[3], peer=at[4], starts=starts)
