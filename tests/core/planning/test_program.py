"""1F1B as programs: what each stage runs, in which order, and that no chain can block itself."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mainstay_core.planning.program import (
    ANSWER,
    Action,
    Op,
    closing,
    compile_compute,
    compile_replay,
    schedule_1f1b,
)

SIZES = [(n, s) for n in (0, 1, 2, 3, 7) for s in (1, 2, 3, 5)]


def run_chain(num_stages: int, programs: list[list[Action]], order: random.Random) -> None:
    """Run the programs with asynchronous sends and blocking receives, in a random interleaving."""
    sent: set[tuple[Op, int, int, int]] = set()
    at = [0] * num_stages
    while any(i < len(p) for i, p in zip(at, programs, strict=True)):
        able = []
        for stage, program in enumerate(programs):
            if at[stage] == len(program):
                continue
            action = program[at[stage]]
            flow = (action.type, action.micro_batch)
            if action.op is Op.RECV_F and (Op.SEND_F, stage - 1, *flow) not in sent:
                continue
            if action.op is Op.RECV_B and (Op.SEND_B, stage + 1, *flow) not in sent:
                continue
            able.append(stage)
        assert able, f"every stage waits: {[p[i:][:1] for i, p in zip(at, programs, strict=True)]}"
        stage = order.choice(able)
        action = programs[stage][at[stage]]
        if action.op in (Op.SEND_F, Op.SEND_B):
            sent.add((action.op, stage, action.type, action.micro_batch))
        at[stage] += 1


Leg = tuple[Op, int, int, int]
"""What is sent or received, the peer's stage, and the flow."""
OTHER_END = {
    Op.SEND_F: Op.RECV_F,
    Op.RECV_F: Op.SEND_F,
    Op.SEND_B: Op.RECV_B,
    Op.RECV_B: Op.SEND_B,
}


def operations(program: Sequence[Action]) -> list[list[Leg]]:
    """Return what a rank hands to its communicator, in order; legs of one operation go together."""
    posted: set[Leg] = set()
    ordered = []
    for action in program:
        peer = action.stage + (1 if action.op in (Op.SEND_F, Op.RECV_B) else -1)
        leg = (action.op, peer, action.type, action.micro_batch)
        if action.op in ANSWER:
            legs = [leg]
            if action.posts is not None:
                legs.append((ANSWER[action.op], peer, *action.posts))
                posted.add(legs[1])
            ordered.append(legs)
        elif action.op in OTHER_END and leg not in posted:
            ordered.append([leg])
    return ordered


def run_strictly(programs: Sequence[Sequence[Action]]) -> None:
    """Run the transfers without buffers: a leg is over when the peer is at its other end.

    A rank's operations run one after the other, whoever the peer is, and nothing but their order
    says which receive belongs to which send.
    """
    waiting = [operations(program) for program in programs]
    while any(waiting):
        over = []
        for stage, later in enumerate(waiting[:-1]):
            here = [leg for leg in later[0] if leg[1] == stage + 1] if later else []
            there = waiting[stage + 1]
            for leg in here:
                op, _, *flow = leg
                legs = there[0] if there else []
                answers = [a for a in legs if a[:2] == (OTHER_END[op], stage)]
                if answers:
                    assert answers[0][2:] == tuple(flow), f"{leg} would be taken for {answers[0]}"
                    over += [(stage, leg), (stage + 1, answers[0])]
        assert over, f"every stage waits: {[later[:1] for later in waiting]}"
        for stage, leg in over:
            waiting[stage][0].remove(leg)
        for later in waiting:
            if later and not later[0]:
                later.pop(0)


@pytest.mark.parametrize(("num_flows", "num_stages"), SIZES)
def test_every_flow_goes_forward_once_then_backward_once_in_ascending_order(
    num_flows: int, num_stages: int
) -> None:
    for stage in range(num_stages):
        order = schedule_1f1b(num_flows, stage, num_stages)

        assert [i for forward, i in order if forward] == list(range(num_flows))
        assert [i for forward, i in order if not forward] == list(range(num_flows))
        for flow in range(num_flows):
            assert order.index((True, flow)) < order.index((False, flow))


@pytest.mark.parametrize(("num_flows", "num_stages"), SIZES)
def test_a_stage_runs_ahead_by_the_number_of_stages_behind_it(
    num_flows: int, num_stages: int
) -> None:
    for stage in range(num_stages):
        order = schedule_1f1b(num_flows, stage, num_stages)
        in_flight = most = 0
        for forward, _ in order:
            in_flight += 1 if forward else -1
            most = max(most, in_flight)

        assert most == min(num_flows, num_stages - stage)
        backward = [i for i, (forward, _) in enumerate(order) if not forward]
        assert not backward or backward[0] == most


def test_the_last_stage_alternates_from_the_start() -> None:
    assert schedule_1f1b(2, 1, 2) == ((True, 0), (False, 0), (True, 1), (False, 1))


def test_programs_in_order_are_what_they_were_action_for_action() -> None:
    """Trainers of two versions may meet in one chain, and a faults file names actions."""
    told = {s: " ".join(map(str, compile_compute([3, 1], 1, s, 3))) for s in range(3)}

    assert told == {
        0: "FORWARD t3.m0@s0 SEND_F t3.m0@s0 FORWARD t1.m0@s0 SEND_F t1.m0+RECV_B t3.m0@s0 "
        "RECV_B t3.m0@s0 BACKWARD_INPUT t3.m0@s0 BACKWARD_WEIGHT t3.m0@s0 RECV_B t1.m0@s0 "
        "BACKWARD_INPUT t1.m0@s0 BACKWARD_WEIGHT t1.m0@s0",
        1: "RECV_F t3.m0@s1 FORWARD t3.m0@s1 SEND_F t3.m0@s1 RECV_F t1.m0@s1 FORWARD t1.m0@s1 "
        "SEND_F t1.m0+RECV_B t3.m0@s1 RECV_B t3.m0@s1 BACKWARD_INPUT t3.m0@s1 SEND_B t3.m0@s1 "
        "BACKWARD_WEIGHT t3.m0@s1 RECV_B t1.m0@s1 BACKWARD_INPUT t1.m0@s1 SEND_B t1.m0@s1 "
        "BACKWARD_WEIGHT t1.m0@s1",
        2: "RECV_F t3.m0@s2 FORWARD t3.m0@s2 BACKWARD_INPUT t3.m0@s2 "
        "SEND_B t3.m0+RECV_F t1.m0@s2 BACKWARD_WEIGHT t3.m0@s2 RECV_F t1.m0@s2 FORWARD t1.m0@s2 "
        "BACKWARD_INPUT t1.m0@s2 SEND_B t1.m0@s2 BACKWARD_WEIGHT t1.m0@s2",
    }


@pytest.mark.parametrize(("num_flows", "num_stages"), SIZES)
def test_in_order_a_flow_visits_each_stage_once_and_its_neighbours_are_beside_it(
    num_flows: int, num_stages: int
) -> None:
    for stage in range(num_stages):
        for action in compile_compute(range(num_flows), 1, stage, num_stages):
            beside = {Op.SEND_F: 1, Op.RECV_B: 1, Op.RECV_F: -1, Op.SEND_B: -1}.get(action.op)
            assert action.visit == stage
            assert action.peer == (-1 if beside is None else stage + beside)
            assert (action.extent, action.starts) == ("whole", ())


def test_the_middle_stage_receives_and_sends_both_ways() -> None:
    program = compile_compute([5], 1, 1, 3)

    assert [a.op for a in program] == [
        Op.RECV_F,
        Op.FORWARD,
        Op.SEND_F,
        Op.RECV_B,
        Op.BACKWARD_INPUT,
        Op.SEND_B,
        Op.BACKWARD_WEIGHT,
    ]
    assert {(a.stage, a.type, a.micro_batch) for a in program} == {(1, 5, 0)}


def test_a_single_stage_communicates_with_nobody() -> None:
    ops = {a.op for a in compile_compute([0, 1], 2, 0, 1)}

    assert ops == {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}


def test_types_complete_in_the_order_of_the_list_on_every_stage() -> None:
    for stage in range(3):
        program = compile_compute([4, 1, 2], 2, stage, 3)
        weights = [(a.type, a.micro_batch) for a in program if a.op is Op.BACKWARD_WEIGHT]

        assert weights == [(4, 0), (4, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_an_empty_list_is_an_empty_program() -> None:
    assert compile_compute([], 4, 0, 2) == ()


def test_no_chain_can_block_itself_whatever_its_size_and_interleaving() -> None:
    rng = random.Random(3)
    for _ in range(300):
        num_stages, micro_batches = rng.randint(1, 6), rng.randint(1, 4)
        types = rng.sample(range(12), rng.randint(0, 5))
        programs = [
            list(compile_compute(types, micro_batches, stage, num_stages))
            for stage in range(num_stages)
        ]

        run_chain(num_stages, programs, rng)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_no_chain_blocks_itself_on_a_transport_without_buffers(num_stages: int) -> None:
    for num_flows in range(33):
        programs = [
            compile_compute(range(num_flows), 1, stage, num_stages) for stage in range(num_stages)
        ]

        run_strictly(programs)


def test_patches_do_not_block_on_a_transport_without_buffers() -> None:
    rng = random.Random(7)
    for _ in range(100):
        num_stages, micro_batches = rng.randint(2, 8), rng.randint(1, 5)
        types = rng.sample(range(24), rng.randint(1, 6))

        run_strictly(
            [
                compile_compute(types, micro_batches, stage, num_stages)
                for stage in range(num_stages)
            ]
        )


def test_neighbours_that_both_send_first_would_block() -> None:
    programs = [
        [replace(action, posts=None) for action in compile_compute([0], 2, stage, 2)]
        for stage in range(2)
    ]

    with pytest.raises(AssertionError, match="every stage waits"):
        run_strictly(programs)


def test_a_posted_receive_is_waited_for_later_and_once() -> None:
    for stage, num_stages in itertools.combinations(range(8), 2):
        program = compile_compute([2, 5], 3, stage, num_stages)
        for i, action in enumerate(program):
            if action.posts is not None:
                waits = Action(ANSWER[action.op], stage, *action.posts, visit=stage)
                waits = replace(waits, peer=action.peer)
                assert [a for a in program[i:] if replace(a, posts=None) == waits] == [waits]


def test_an_action_names_its_flow_and_stage() -> None:
    assert str(Action(Op.SEND_B, 2, 3, 0, posts=(3, 1))) == "SEND_B t3.m0+RECV_F t3.m1@s2"
    assert str(Action(Op.FORWARD, 1, 3, 0)) == "FORWARD t3.m0@s1"
    assert str(Action(Op.VOTE, 0)) == "VOTE@s0"


EXCHANGES = 3
"""Of a reduction, between the cells of a stage."""


def queue_of(program: Sequence[Action], begins: Action | None, late: int) -> list[list[Leg] | int]:
    """What one rank hands to a device that runs its operations one by one, whatever their group.

    Args:
        program: of the rank.
        begins: before this action a reduction begins; None: when the program has ended.
        late: by how many operations the reduction's exchanges are late, each.
    """
    before = len(program) if begins is None else program.index(begins)
    done = operations(program[:before])
    ordered: list[list[Leg] | int] = list(operations(program))
    for number in range(EXCHANGES):
        ordered.insert(len(done) + number + late * (number + 1), number)
    return ordered


def run_serially(queues: dict[tuple[int, int], list[list[Leg] | int]]) -> None:
    """Run replicas, by (replica, stage). An exchange needs all cells of its stage."""
    while any(queues.values()):
        moved = False
        for (replica, stage), later in queues.items():
            if not later:
                continue
            cells = [key for key in queues if key[1] == stage]
            heads = [queues[key][0] if queues[key] else None for key in cells]
            if isinstance(later[0], int):
                if all(head == later[0] for head in heads):
                    for key in cells:
                        queues[key].pop(0)
                    moved = True
                    break
                continue
            there = queues.get((replica, stage + 1), [])
            answers = there[0] if there and isinstance(there[0], list) else []
            for leg in [leg for leg in later[0] if leg[1] == stage + 1]:
                op, _, *flow = leg
                found = [a for a in answers if a == (OTHER_END[op], stage, *flow)]
                if found:
                    later[0].remove(leg)
                    answers.remove(found[0])
                    moved = True
        assert moved, f"every rank waits: { {key: later[:1] for key, later in queues.items()} }"
        for later in queues.values():
            while later and later[0] == []:
                later.pop(0)


def draw_replicas(rng: random.Random) -> dict[tuple[int, int], tuple[Action, ...]]:
    num_stages, micro_batches = rng.randint(1, 5), rng.randint(1, 3)
    lists = [rng.sample(range(12), rng.randint(0, 3)) for _ in range(rng.randint(2, 4))]
    return {
        (replica, stage): compile_compute(types, micro_batches, stage, num_stages)
        for replica, types in enumerate(lists)
        for stage in range(num_stages)
    }


@pytest.mark.parametrize("seed", range(150))
def test_a_reduction_that_begins_early_blocks_nobody_on_a_device_that_runs_one_operation_at_a_time(
    seed: int,
) -> None:
    """Whoever begins it early, and however late its exchanges are."""
    rng = random.Random(seed)
    queues = {}
    for key, program in draw_replicas(rng).items():
        closes = closing(program)
        begins = rng.choice([*closes, None]) if closes else None
        queues[key] = queue_of(program, begins, rng.randint(0, 2))

    run_serially(queues)


def test_a_reduction_between_two_transfers_can_block_all() -> None:
    blocked = 0
    for seed in range(150):
        rng = random.Random(seed)
        queues = {
            key: queue_of(program, rng.choice([*program, None]), rng.randint(0, 2))
            for key, program in draw_replicas(rng).items()
        }
        try:
            run_serially(queues)
        except AssertionError:
            blocked += 1
    assert blocked


def test_what_closes_a_program_is_the_last_flow_behind_the_last_transfer() -> None:
    for num_stages in range(1, 5):
        for stage in range(num_stages):
            program = compile_compute([4, 1], 2, stage, num_stages)
            closes = closing(program)
            assert program[-len(closes) :] == closes
            assert {(a.type, a.micro_batch) for a in closes} == {(1, 1)}
            ops = [a.op for a in closes]
            if num_stages == 1:
                assert ops == [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
            elif stage == 0:
                assert ops == [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
            else:
                assert ops == [Op.BACKWARD_WEIGHT]
    assert closing(()) == ()


@pytest.mark.parametrize("num_stages", range(1, 5))
def test_a_stage_that_computes_again_reads_and_logs_what_it_received_and_sent(
    num_stages: int,
) -> None:
    transfers = {
        Op.RECV_F: Op.READ_F,
        Op.RECV_B: Op.READ_B,
        Op.SEND_F: Op.WRITE_F,
        Op.SEND_B: Op.WRITE_B,
    }
    for stage in range(num_stages):
        first = compile_compute([4, 1], 2, stage, num_stages)
        again = compile_replay([4, 1], 2, stage, num_stages)
        flows = [(transfers.get(a.op, a.op), a.stage, a.type, a.micro_batch) for a in first]
        assert [(a.op, a.stage, a.type, a.micro_batch) for a in again] == flows
        assert all(action.posts is None for action in again)
