"""Receipts: a receive tells only of sends that the neighbour has taken, whatever else happens."""

import random

import pytest

from mainstay_core.base.shape import Order
from mainstay_core.planning import receipts as planned
from mainstay_core.planning.program import (
    ANSWER,
    BESIDE,
    Action,
    Op,
    Receive,
    compile_compute,
    write_1f1b,
)
from mainstay_core.planning.receipts import receipts_of

SENT_AS = {Op.RECV_F: Op.SEND_F, Op.RECV_B: Op.SEND_B}
CASES = [
    (types, micro_batches, num_stages, order)
    for types in ((), (0,), (3, 1), (0, 1, 2, 5, 7, 8))
    for micro_batches in (1, 2, 4)
    for num_stages in (1, 2, 3, 4, 6)
    for order in Order
    if num_stages > 1 or order is Order.IN_ORDER
]
Place = tuple[Op, int, int, int]


def place(action: Action) -> Place:
    return action.op, action.type, action.micro_batch, action.visit


def source(action: Action) -> Place:
    """The send whose message a receive gets."""
    visit = action.visit + BESIDE[action.op]
    return SENT_AS[action.op], action.type, action.micro_batch, visit


def as_receive(action: Action) -> Receive:
    return Receive(action.op, action.type, action.micro_batch, action.visit, action.peer)


def programs_of(case: tuple[tuple[int, ...], int, int, Order]) -> list[tuple[Action, ...]]:
    types, micro_batches, num_stages, order = case
    stages = range(num_stages)
    return [compile_compute(types, micro_batches, stage, num_stages, order) for stage in stages]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_receipt_tells_of_has_been_taken_in_every_interleaving(
    case: tuple[tuple[int, ...], int, int, Order],
) -> None:
    programs = programs_of(case)
    types, micro_batches, num_stages, order = case
    receipts = [
        receipts_of(types, micro_batches, stage, num_stages, order) for stage in range(num_stages)
    ]
    draw = random.Random(str(case))
    for _ in range(3):
        weights = [draw.random() for _ in programs]  # some stages are slow
        sent: set[Place] = set()
        taken: set[Place] = set()
        at = [0] * num_stages
        while able := [
            stage
            for stage, program in enumerate(programs)
            if at[stage] < len(program)
            and (program[at[stage]].op not in SENT_AS or source(program[at[stage]]) in sent)
        ]:
            stage = draw.choices(able, [weights[each] for each in able])[0]
            action = programs[stage][at[stage]]
            at[stage] += 1
            if action.op in ANSWER:
                sent.add(place(action))
            elif action.op in SENT_AS:
                taken.add(source(action))
                told = receipts[stage].get(as_receive(action), ())
                assert {place(each) for each in told} <= taken
        assert at == [len(program) for program in programs]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_kept_follows_from_the_stages_alone_and_each_receipt_comes_once(
    case: tuple[tuple[int, ...], int, int, Order],
) -> None:
    types, micro_batches, num_stages, order = case
    for stage, program in enumerate(programs_of(case)):
        receipts = receipts_of(types, micro_batches, stage, num_stages, order)
        kept: set[Action] = set()
        for action in program:
            if action.op in ANSWER:
                kept.add(action)
            for each in receipts.get(as_receive(action), ()):
                kept.remove(each)
            bound = 2 * num_stages if order is Order.IN_ORDER else 4 * num_stages
            assert len(kept) <= bound
        if order is Order.IN_ORDER:
            assert {action.op for action in kept} <= {Op.SEND_B}
            num_flows = len(types) * micro_batches
            least = min(num_flows, num_stages - stage + 1) if stage else 0
            assert len(kept) == least, "those after which nothing comes"


def test_the_gradient_is_the_receipt_of_its_output() -> None:
    (send,) = (a for a in compile_compute([4], 1, 0, 2) if a.op is Op.SEND_F)
    assert receipts_of((4,), 1, 0, 2, Order.IN_ORDER) == {Receive(Op.RECV_B, 4, 0, 0, 1): (send,)}
    assert receipts_of((4,), 1, 1, 2, Order.IN_ORDER) == {}


def test_in_order_only_the_stages_beside_it_are_compiled_and_no_cache_keeps_these(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached: list[int] = []
    written: list[int] = []

    def compiled(types: tuple[int, ...], flows: int, stage: int, *more: object) -> object:
        cached.append(stage)
        return compile_compute(types, flows, stage, *more)  # type: ignore[arg-type]

    def wrote(types: tuple[int, ...], flows: int, stage: int, stages: int) -> object:
        written.append(stage)
        return write_1f1b(types, flows, stage, stages)

    monkeypatch.setattr(planned, "compile_compute", compiled)
    monkeypatch.setattr(planned, "write_1f1b", wrote)
    for stage, beside in ((0, [1]), (7, [6, 8]), (15, [14])):
        cached.clear()
        written.clear()
        assert receipts_of((90, 91), 3, stage, 16, Order.IN_ORDER)
        assert (cached, written) == ([stage], beside)
