"""Compiles a rank's step into a program: one list of typed actions (design section 6).

The interpreter runs a program and knows no policy. Patch, replay and checker work are other
programs, not other loops. Names are those of ``torch.distributed.pipelining`` where it has one.
Gradients accumulate in micro-batch order whatever the schedule: 1F1B keeps the backward order of a
chain equal to its forward order, and where flows take several routes
:mod:`mainstay_core.planning.played` orders the weight gradients.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from mainstay_core.base.shape import Order, most_flows_under_way
from mainstay_core.planning.played import Kind, Line, Transfer, Work, play
from mainstay_core.planning.routes import Extent, Route, route_of


class Op(enum.StrEnum):
    """The kinds of actions."""

    FORWARD = "FORWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    VOTE = "VOTE"
    APPLY = "APPLY"
    CHECKPOINT = "CHECKPOINT"
    """Copy at a step's boundary what is to be written."""
    CHECKPOINT_WRITE = "CHECKPOINT_WRITE"
    """Begin to write the part, in the background."""
    CHECKPOINT_SYNC = "CHECKPOINT_SYNC"
    """Make the written part safe, in the background."""
    CHECKPOINT_SAFE = "CHECKPOINT_SAFE"
    """Say in the next vote that the part is safe."""
    CHECKPOINT_RENAME = "CHECKPOINT_RENAME"
    """Make a version complete of which all parts are safe, in the background."""
    CHECKPOINT_RENAMED = "CHECKPOINT_RENAMED"
    """Say in the next vote that the version is complete."""
    HEAL = "HEAL"
    SETTLE = "SETTLE"
    """Tell the others of a new quorum what this rank holds."""
    SERVE = "SERVE"
    """Give this rank's state to another cell of its stage."""
    SNAPSHOT = "SNAPSHOT"
    """Begin to copy a part of the state into the memory of pods."""
    SNAPSHOT_COPIED = "SNAPSHOT_COPIED"
    """The part is in the memory of this pod; done in the background."""
    SNAPSHOT_HELD = "SNAPSHOT_HELD"
    """The part is in the memory of all pods that are to keep it; noted in the background."""
    LOG = "LOG"
    """Copy the reduced gradient into the memory of pods, before the vote."""
    LOGGED = "LOGGED"
    """Say in the vote whether the gradient is where it belongs."""
    REPLAY = "REPLAY"
    """Make a state anew from what the memory of pods holds."""
    REPLAYED = "REPLAYED"
    """Go on with the state that was made anew."""
    READ_F = "READ_F"
    """In a replay: read from a log what RECV_F received."""
    READ_B = "READ_B"
    """In a replay: read from a log what RECV_B received."""
    WRITE_F = "WRITE_F"
    """In a replay: log what SEND_F sent."""
    WRITE_B = "WRITE_B"
    """In a replay: log what SEND_B sent."""
    INNER_WAIT = "INNER_WAIT"
    """Inside of a block that is checked: wait for the other ranks of the cell in a collective."""


Flow = tuple[int, int]
"""(type, micro-batch)."""

COMPUTES = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
"""What a rank of a chain does without its neighbours."""

ANSWER = {Op.SEND_F: Op.RECV_B, Op.SEND_B: Op.RECV_F}
"""What comes back from the neighbour to which something is sent."""

BY_LOG = {
    Op.RECV_F: Op.READ_F,
    Op.RECV_B: Op.READ_B,
    Op.SEND_F: Op.WRITE_F,
    Op.SEND_B: Op.WRITE_B,
}
"""What takes a transfer's place where logs stand for the neighbours."""


class Receive(NamedTuple):
    """A receive that begins before the action that waits for it."""

    op: Op
    type: int
    micro_batch: int
    visit: int
    peer: int


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank's program."""

    op: Op
    stage: int
    type: int = -1
    """Shard type; -1 where an action concerns the whole step."""
    micro_batch: int = -1
    posts: Flow | None = None
    """Of a send: the flow that this rank receives next from the same neighbour. The receive is
    started together with the send, and its own action waits for it."""
    visit: int = -1
    """Place on the flow's route; a rank may be there twice. -1 as with ``type``."""
    peer: int = -1
    """Of a transfer: the stage at its other end."""
    extent: Extent = Extent.WHOLE
    """The part of the stage that is computed."""
    starts: tuple[Receive, ...] = ()
    """Receives that start just before this action, one by one; their own actions wait for them."""

    def __str__(self) -> str:
        flow = f" t{self.type}.m{self.micro_batch}" if self.type >= 0 else ""
        posts = f"+{ANSWER[self.op]} t{self.posts[0]}.m{self.posts[1]}" if self.posts else ""
        part = "" if self.extent is Extent.WHOLE else f".{self.extent}"
        return f"{self.op}{flow}{posts}@s{self.stage}{part}"


def schedule_1f1b(num_flows: int, stage: int, num_stages: int) -> tuple[tuple[bool, int], ...]:
    """Return the order of one stage's (is_forward, flow) under 1F1B.

    A stage runs ``num_stages - 1 - stage`` forwards ahead, then alternates (PipeDream-flush, the
    default schedule of torch.distributed.pipelining).
    """
    warmup = min(num_flows, num_stages - 1 - stage)
    order = [(True, i) for i in range(warmup)]
    for i in range(num_flows - warmup):
        order += [(True, warmup + i), (False, i)]
    order += [(False, i) for i in range(num_flows - warmup, num_flows)]
    return tuple(order)


def compile_compute(
    shard_types: Sequence[int],
    micro_batches: int,
    stage: int,
    num_stages: int,
    order: Order = Order.IN_ORDER,
) -> tuple[Action, ...]:
    """Return the compute part of a rank's step: every type through its stage.

    Args:
        shard_types: types of the rank's chain, in order.
        micro_batches: micro-batches per type.
        stage: the rank's stage, 0..num_stages-1.
        num_stages: stages of the chain.
        order: in which micro-batches pass the stages.
    """
    if order is Order.IN_ORDER:
        return _compile_1f1b(tuple(shard_types), micro_batches, stage, num_stages)
    return _compile_played(tuple(shard_types), micro_batches, num_stages, order)[stage]


@lru_cache(maxsize=64)
def _compile_1f1b(
    shard_types: tuple[int, ...], micro_batches: int, stage: int, num_stages: int
) -> tuple[Action, ...]:
    """Return the program of a stage that all flows pass in the same order.

    Cached: as a rule a chain computes the same types in every step.
    """
    return write_1f1b(shard_types, micro_batches, stage, num_stages)


def write_1f1b(
    shard_types: Sequence[int], micro_batches: int, stage: int, num_stages: int
) -> tuple[Action, ...]:
    """Write the program of a stage that all flows pass in the same order; not cached.

    A transport without buffers ends a send only when its receive has begun, and takes the
    operations of a rank in their order. There two neighbours that both send first wait for each
    other for ever. So a send is joined with the receive that follows it from the same neighbour:
    both start at once (SEND_F_RECV_B and SEND_B_RECV_F in torch.distributed.pipelining).
    """
    flows = [(t, m) for t in shard_types for m in range(micro_batches)]
    actions: list[Action] = []
    for is_forward, i in schedule_1f1b(len(flows), stage, num_stages):
        shard_type, micro_batch = flows[i]

        def act(op: Op, peer: int = -1, t: int = shard_type, m: int = micro_batch) -> None:
            actions.append(Action(op, stage, t, m, visit=stage, peer=peer))

        if is_forward:
            if stage > 0:
                act(Op.RECV_F, stage - 1)
            act(Op.FORWARD)
            if stage < num_stages - 1:
                act(Op.SEND_F, stage + 1)
        else:
            if stage < num_stages - 1:
                act(Op.RECV_B, stage + 1)
            act(Op.BACKWARD_INPUT)
            if stage > 0:
                act(Op.SEND_B, stage - 1)
            act(Op.BACKWARD_WEIGHT)
    return _join_transfers(actions)


@lru_cache(maxsize=16)
def _compile_played(
    shard_types: tuple[int, ...], micro_batches: int, num_stages: int, order: Order
) -> tuple[tuple[Action, ...], ...]:
    """Return the programs of all stages of a chain whose flows take several routes.

    Cached: as a rule a chain computes the same types in every step.
    """
    flows = [(t, m) for t in shard_types for m in range(micro_batches)]
    routes = [route_of(order, t * micro_batches + m, num_stages) for t, m in flows]
    lines = play(routes, num_stages, most_flows_under_way(order, 0, num_stages))
    return tuple(_Writer(stage, flows, routes).write(line) for stage, line in enumerate(lines))


class _Writer:
    """Writes what a rank did in a play as its program.

    A rank's communicator must get transfers in the order of the play. Sends are actions, and stand
    where they happened. A receive starts before what this rank computes meanwhile, for which its
    sender then need not wait, and no earlier: so the play's bound holds for what arrives as well.
    """

    def __init__(self, stage: int, flows: Sequence[Flow], routes: Sequence[Route]) -> None:
        self._stage, self._flows, self._routes = stage, flows, routes
        self._actions: list[Action] = []
        self._starts: dict[int, list[Receive]] = {}
        """By the number of the action before which they start."""

    def write(self, line: Line) -> tuple[Action, ...]:
        newest_work = 0
        for event in line:
            if isinstance(event, Work):
                newest_work = len(self._actions)
                self._work(event)
            elif event.sends:
                self._act(Op.SEND_F if event.forward else Op.SEND_B, event.flow, event.visit)
            else:
                before = newest_work if event.is_busy else len(self._actions)
                self._starts.setdefault(before, []).append(self._receive(event))
        return tuple(
            replace(action, starts=tuple(self._starts.get(number, ())))
            for number, action in enumerate(self._actions)
        )

    def _work(self, work: Work) -> None:
        route = self._routes[work.flow]
        if work.kind is Kind.FORWARD and work.visit > 0:
            self._act(Op.RECV_F, work.flow, work.visit)
        elif work.kind is Kind.BACKWARD_INPUT and work.visit < len(route) - 1:
            self._act(Op.RECV_B, work.flow, work.visit)
        self._act(_OP_OF[work.kind], work.flow, work.visit)

    def _act(self, op: Op, flow: int, visit: int) -> None:
        self._actions.append(
            Action(
                op,
                self._stage,
                *self._flows[flow],
                visit=visit,
                peer=self._peer(op, flow, visit),
                extent=self._routes[flow][visit].extent,
            )
        )

    def _receive(self, transfer: Transfer) -> Receive:
        op = Op.RECV_F if transfer.forward else Op.RECV_B
        flow, visit = transfer.flow, transfer.visit
        return Receive(op, *self._flows[flow], visit, self._peer(op, flow, visit))

    def _peer(self, op: Op, flow: int, visit: int) -> int:
        if op not in BESIDE:
            return -1
        return self._routes[flow][visit + BESIDE[op]].stage


_OP_OF = {
    Kind.FORWARD: Op.FORWARD,
    Kind.BACKWARD_INPUT: Op.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: Op.BACKWARD_WEIGHT,
}
BESIDE = {Op.SEND_F: 1, Op.RECV_B: 1, Op.RECV_F: -1, Op.SEND_B: -1}
"""The visit of a flow at a transfer's other end, seen from this one."""


def compile_replay(
    shard_types: Sequence[int], micro_batches: int, stage: int, num_stages: int
) -> tuple[Action, ...]:
    """Return the compute part of a step that a stage computes again, without its neighbours.

    What these sent is read from logs, and what they would be sent is logged (MoEvement, arXiv
    2412.15411, section 3.4).

    Args:
        shard_types: types of the step, in order.
        micro_batches: micro-batches per type.
        stage: the rank's stage, 0..num_stages-1.
        num_stages: stages of a chain.
    """
    program = compile_compute(shard_types, micro_batches, stage, num_stages)
    return tuple(replace(a, op=BY_LOG.get(a.op, a.op), posts=None) for a in program)


def closing(program: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of the last flow that come when all sends and receives have started.

    What another group exchanges may start in these. Earlier it could stand between two transfers,
    and a transport that takes a rank's operations one after the other, whatever their group, might
    wait for ever. Where flows take several routes there are none: the weights of a flow that a rank
    holds twice do not get their gradients from the last block to the first.
    """
    if any(action.starts for action in program):
        return ()
    transfers = [i for i, action in enumerate(program) if action.op not in COMPUTES]
    rest = program[transfers[-1] + 1 if transfers else 0 :]
    return tuple(a for a in rest if (a.type, a.micro_batch) == _flow(program[-1]))


def _flow(action: Action) -> Flow:
    return action.type, action.micro_batch


def _join_transfers(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions, where a send posts the receive that is next with its neighbour."""
    joined = list(actions)
    for send, receive in ANSWER.items():
        shared = [i for i, action in enumerate(actions) if action.op in (send, receive)]
        for i, after in pairwise(shared):
            if actions[i].op is send and actions[after].op is receive:
                flow = (actions[after].type, actions[after].micro_batch)
                joined[i] = replace(actions[i], posts=flow)
    return tuple(joined)
