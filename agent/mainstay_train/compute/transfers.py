"""Sends and receives what goes from stage to stage, for the interpreter of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mainstay_core.base.shape import Order
from mainstay_core.planning.program import ANSWER, Action, Op, Receive
from mainstay_core.planning.receipts import Receipts, receipts_of
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.planned import Window
from mainstay_train.comm.chains import ChainGroups
from mainstay_train.comm.group import Group
from mainstay_train.comm.mesh import InnerMesh
from mainstay_train.comm.operations import Message, Pending
from mainstay_train.compute import arrivals

FORWARD_TAG = 0
BACKWARD_TAG = 1


class Transfers:
    """The activations and gradients under way between one rank and others of its chain.

    Args:
        num_stages: stages of a chain.
        micro_batches: per type.
        order: in which micro-batches pass the stages.
        inner: this rank's place in its cell; its peers have the same.
        make: makes memory for what comes.
        checks: executed until it has come, those that wait.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        micro_batches: int,
        order: Order,
        inner: InnerMesh,
        make: Callable[[], torch.Tensor],
        checks: Checks,
    ) -> None:
        self._num_stages, self._micro_batches, self._order = num_stages, micro_batches, order
        self._inner, self._make, self._checks = inner, make, checks
        self._chain: ChainGroups | None = None
        self._sends: dict[Action, Pending] = {}
        self._receipts: Receipts = {}
        """Of what is sent over a group that does not say by itself that a send is over."""
        self._taken: list[Action] = []
        """Sends that the peer has received, as a receipt has told since the newest action."""
        self._posted: dict[Receive, tuple[torch.Tensor, Pending]] = {}
        """Receives that began before the action that waits for them."""

    def begin(self, chain: ChainGroups | None, program: Sequence[Action]) -> None:
        """Run a program over the groups of a chain from here on; None: of a chain of one rank."""
        self._chain = chain
        self._receipts = {}
        if chain is None or chain.pipeline is None or chain.pipeline.tells_sent:
            return
        # Weights get their gradients in the order of the flows, whatever their routes.
        types = dict.fromkeys(a.type for a in program if a.op is Op.BACKWARD_WEIGHT)
        if types:
            self._receipts = receipts_of(
                tuple(types), self._micro_batches, program[0].stage, self._num_stages, self._order
            )

    def start(self, receive: Receive) -> None:
        """Begin to receive."""
        message = self._incoming(receive)
        self._posted[receive] = message.tensor, self._pipeline.receive(message)

    def received(self, action: Action) -> torch.Tensor:
        """Return what an action receives; waits until it has come.

        Raises:
            GroupEnded: the chain broke.
        """
        receive = Receive(action.op, *visit_of(action), action.peer)
        if receive not in self._posted:
            self.start(receive)
        tensor, pending = self._posted.pop(receive)
        window = Window(action.op, (action.type, action.micro_batch), action.extent)
        with self._checks.window(window, tensor):
            arrivals.finish(self._pipeline, pending, self._checks.waiting, window)
        self._taken += self._receipts.get(receive, ())
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Begin to send a contiguous tensor, with the receive that the action posts.

        Raises:
            GroupEnded: the chain broke.
        """
        tag = self._tag(action.op, *visit_of(action))
        message = Message(tensor, self._rank_of(action.peer), tag)
        if action.posts is None:
            self._sends[action] = self._pipeline.send(message)
            return
        answer = Receive(ANSWER[action.op], *action.posts, action.visit, action.peer)
        incoming = self._incoming(answer)
        sent, received = self._pipeline.send_and_receive(message, incoming)
        self._sends[action] = sent
        self._posted[answer] = incoming.tensor, received

    def let_go(self) -> None:
        """Drop what others have taken; blocks nobody.

        Raises:
            GroupEnded: the chain broke.
        """
        taken, self._taken = self._taken, []
        for action in taken:
            if action in self._sends:
                self._pipeline.finish(self._sends.pop(action))
        while self._sends and self._sends[first := next(iter(self._sends))].is_over:
            self._pipeline.finish(self._sends.pop(first))

    def finish(self) -> None:
        """Wait until others have taken everything.

        Raises:
            GroupEnded: the chain broke.
        """
        while self._sends:
            self._pipeline.finish(self._sends.pop(next(iter(self._sends))))

    def clear(self) -> None:
        """Forget what is under way."""
        self._sends.clear()
        self._taken.clear()
        self._posted.clear()

    @property
    def _pipeline(self) -> Group:
        assert self._chain is not None
        assert self._chain.pipeline is not None, "only chains of several stages communicate"
        return self._chain.pipeline

    def _incoming(self, receive: Receive) -> Message:
        return Message(self._make(), self._rank_of(receive.peer), self._tag(*receive[:-1]))

    def _rank_of(self, stage: int) -> int:
        return stage * self._inner.size + self._inner.index

    def _tag(self, op: Op, shard_type: int, micro_batch: int, visit: int) -> int:
        number = shard_type * self._micro_batches + micro_batch
        if self._order is not Order.IN_ORDER:
            # Two stages may meet twice on a route, which has two visits more than there are stages.
            earlier = visit - (op in (Op.RECV_F, Op.SEND_B))
            number = number * (self._num_stages + 2) + earlier
        return 2 * number + (FORWARD_TAG if op in (Op.SEND_F, Op.RECV_F) else BACKWARD_TAG)


def visit_of(action: Action) -> tuple[int, int, int]:
    """Return the flow of an action, type and micro-batch, and its place on the flow's route."""
    return action.type, action.micro_batch, action.visit
