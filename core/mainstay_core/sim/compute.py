"""A position's arithmetic on terms: the program of a step, partials, the reduction.

Runs the actions of :func:`mainstay_core.planning.program.compile_compute` as
``mainstay_train.compute.interpreter`` does, and the two exchanges of
``mainstay_train.exact.reduction``.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mainstay_core.base.shape import Order
from mainstay_core.dmr.accounts import make_account
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.witness import Account, Exchanged, Sent
from mainstay_core.planning.partials import grow
from mainstay_core.planning.program import Action, Op, compile_compute, compile_replay
from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.reports import Ballot
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Steps
from mainstay_core.sim.groups import Group
from mainstay_core.wire.ledger import FinalDigests
from mainstay_core.wire.plan import Partial
from mainstay_core.wire.votes import TypeStat

Hook = Callable[[Action], Steps[None]]
"""Before each action."""
FORWARD, BACKWARD = 0, 1
Key = tuple[int, int, int]
"""Of a micro-batch in a stage: type, micro-batch, and place on the flow's route."""


class Wrong(enum.Enum):
    """The ways in which a value comes out wrong."""

    FOUND = "a check of the device finds it late"
    UNSEEN = "no check of the device sees it"


class Compute:
    """Computes one position on terms: state, partials, interpreter and reducer of one cell.

    Args:
        position: which: by stage, then by inner rank.
        stages: of a chain.
        width: inner ranks of a stage.
        shards_per_lane: types of a lane.
        micro_batches: per type.
        hook: called before each action.
        sent: called with the action of each send, and what is sent.
        goes_wrong: asked whether the next value of a type comes out wrong.
        order: in which micro-batches pass the stages.
    """

    def __init__(
        self,
        position: int,
        stages: int,
        width: int,
        shards_per_lane: int,
        micro_batches: int,
        hook: Hook,
        sent: Callable[[Action, str], None] = lambda *_: None,
        goes_wrong: Callable[[int], Wrong | None] = lambda _: None,
        order: Order = Order.IN_ORDER,
    ) -> None:
        self._order = order
        self.blocks = terms.blocks_of(position // width, stages, order)
        self.has_own = order is Order.SWAPPED and position // width in (0, stages - 1)
        """Whether it has what no other stage has."""
        self.position, self._stages, self._width = position, stages, width
        self.stage, self.inner = divmod(position, width)
        self._shards_per_lane, self._micro_batches = shards_per_lane, micro_batches
        self._hook, self._sent, self._goes_wrong = hook, sent, goes_wrong
        self.params = ""
        self.reduced: str | None = None
        self._begun: tuple[Group, tuple[Supply, ...], Any] | None = None
        """Group, table and first exchange of a reduction that began while types were computed."""
        self.partials: dict[Partial, tuple[str, ...]] = {}
        self.complete: set[int] = set()
        """Types whose statistics are known."""
        self._wrong: set[int] = set()
        """Types of which something was computed wrongly, as their checks will find."""
        self._found: set[int] = set()
        """Those of which they have found it."""
        self._is_again = False
        self._watched: int | None = None
        """The type of which everything that leaves this cell is kept."""
        self._left: list[Sent] = []
        self._exchanged: list[Exchanged] = []
        self.accounts: dict[int, Account] = {}
        """Of watched types that are complete."""

    def held(self) -> tuple[Partial, ...]:
        """Complete partials."""
        return tuple(sorted(self.partials))

    def drop_held(self) -> None:
        """Forget all partials."""
        self.give_up()
        self.partials.clear()
        self.complete.clear()
        self._wrong.clear()
        self._found.clear()

    def drop_partials(self, partials: Iterable[Partial]) -> None:
        """Forget some partials, and what is known of their types."""
        self.give_up()
        for partial in partials:
            del self.partials[partial]
            types = range(partial.first, partial.last + 1)
            self.complete.difference_update(types)
            self._wrong.difference_update(types)
            self._found.difference_update(types)

    def judge(self) -> None:
        """All checks of what is held are over."""
        self._found = set(self._wrong)

    def bad_types(self) -> tuple[int, ...]:
        """Return the complete types that checks have found to be wrong."""
        return tuple(sorted(self._found & self.complete))

    def give_up(self) -> None:
        """End a reduction that was begun and not ended, and its group."""
        if self._begun is not None:
            self._begun[0].shutdown("an exchange was given up")
            self._begun = None

    def run(
        self,
        types: Sequence[int],
        step: int,
        group: Group | Any,
        early: EarlyReduction[Group] | None,
        *,
        is_again: bool = False,
        watched: int | None = None,
    ) -> Steps[None]:
        """Run the types through the position; complete ones are held, whatever happens.

        Args:
            types: in this order.
            step: whose samples are used.
            group: of the chain.
            early: the reduction that begins with the last type's weight gradients.
            is_again: whether the stage computes this step again, without its neighbours: then the
                group stands for logs.
            watched: a type that other chains compute, too.

        Raises:
            GroupEnded: the chain broke.
        """
        flows: dict[Key, list[str]] = {}
        done: dict[int, list[terms.Passed]] = {}
        sends: list[tuple[int, int]] = []
        self.give_up()
        self._wrong.difference_update(types)
        self._is_again, self._watched, self._left = is_again, watched, []
        self._exchanged = []
        if watched in types:
            self.accounts.clear()
        program = self._program(types, is_again=is_again)
        completing = {a.type: a for a in program if a.op is Op.BACKWARD_WEIGHT}
        for action in program:
            if action.op is Op.BACKWARD_WEIGHT:
                received, _, gradient = flows.pop(_key(action))
                passed = received, gradient, self.params, action.extent
                done.setdefault(action.type, []).append(passed)
            if early is not None and action is program[-1]:
                self._begin(early, terms.weight_gradient(tuple(done[action.type])))
            yield from self._hook(action)
            if action.op in (Op.FORWARD, Op.BACKWARD_INPUT):
                yield from self._compute(action, flows, step, group)
            elif action.op is Op.BACKWARD_WEIGHT:
                if action is completing[action.type]:
                    self._complete(action.type, terms.weight_gradient(tuple(done[action.type])))
            else:
                assert group is not None
                yield from self._transfer(action, flows, sends, group)
        for peer, tag in sends:
            assert group is not None
            yield from group.finish(peer, tag)

    def _program(self, types: Sequence[int], *, is_again: bool) -> tuple[Action, ...]:
        if is_again:
            return compile_replay(types, self._micro_batches, self.stage, self._stages)
        return compile_compute(types, self._micro_batches, self.stage, self._stages, self._order)

    def _transfer(
        self,
        action: Action,
        flows: dict[Key, list[str]],
        sends: list[tuple[int, int]],
        group: Group,
    ) -> Steps[None]:
        key = _key(action)
        number = action.type * self._micro_batches + action.micro_batch
        if self._order is not Order.IN_ORDER:  # two stages may meet twice on a route
            earlier = action.visit - (action.op in (Op.RECV_F, Op.SEND_B))
            number = number * (self._stages + 2) + earlier
        tag, peer = 2 * number, action.peer * self._width + self.inner
        if action.op in (Op.RECV_F, Op.READ_F):
            flows[key] = [(yield from group.receive(peer, tag + FORWARD))]
        elif action.op in (Op.RECV_B, Op.READ_B):
            flows[key].append((yield from group.receive(peer, tag + BACKWARD)))
        else:
            forward = action.op in (Op.SEND_F, Op.WRITE_F)
            tag += FORWARD if forward else BACKWARD
            self._sent(action, flows[key][1])
            if action.type == self._watched:
                self._left.append(
                    Sent(
                        in_pass=Pass.FORWARD if forward else Pass.BACKWARD,
                        micro_batch=action.micro_batch,
                        visit=action.visit,
                        digest=flows[key][1],
                    )
                )
            group.send(flows[key][1], peer, tag)
            sends.append((peer, tag))

    def _compute(
        self,
        action: Action,
        flows: dict[Key, list[str]],
        step: int,
        group: Group | None,
    ) -> Steps[None]:
        key, extent = _key(action), action.extent
        if action.op is Op.FORWARD:
            if action.visit == 0:
                flows[key] = [terms.sample(step, action.type, action.micro_batch)]
            flow = flows[key]
            part = terms.forward(self.position, flow[0], self.params, extent)
            part = self._spoiled(action, part)
            flow.append((yield from self._mix(part, (*key, "f"), group)))
            self._note_exchange(action, Pass.FORWARD, part, flow[-1])
            return
        flow = flows[key]
        gradient = flow[2] if len(flow) > 2 else ""  # nobody sends the loss one
        part = terms.backward(self.position, flow[0], gradient, self.params, extent)
        part = self._spoiled(action, part)
        flow[1:] = [(yield from self._mix(part, (*key, "b"), group)), gradient]
        self._note_exchange(action, Pass.BACKWARD, part, flow[1])

    def _spoiled(self, action: Action, value: str) -> str:
        """Return what a computation comes to: mostly the right value."""
        how = None if self._is_again else self._goes_wrong(action.type)
        if how is None:
            return value
        if how is Wrong.FOUND:
            self._wrong.add(action.type)
        return terms.term("wrong", value)

    def _mix(self, part: str, tag: tuple[object, ...], group: Group | None) -> Steps[str]:
        """All inner ranks of the stage see the sum of their parts."""
        if self._width == 1:
            return part
        assert group is not None
        cell = range(self.stage * self._width, (self.stage + 1) * self._width)
        for peer in cell:
            if peer != self.position:
                group.send(part, peer, tag)
        parts = []
        for peer in cell:
            own = peer == self.position
            parts.append(part if own else (yield from group.receive(peer, tag)))
        return terms.mixed(tuple(parts))

    def _note_exchange(self, action: Action, in_pass: Pass, given: str, made: str) -> None:
        """Note what this rank gave its cell and got, if others compute the type, too."""
        if self._width > 1 and action.type == self._watched:
            self._exchanged.append(
                Exchanged(
                    in_pass=in_pass,
                    micro_batch=action.micro_batch,
                    given=(given,),
                    made=(made,),
                    visit=None if self._order is Order.IN_ORDER else action.visit,
                )
            )

    def _complete(self, shard_type: int, gradient: str) -> None:
        self.partials = self._with(shard_type, gradient)
        if shard_type == self._watched:
            in_order = self._order is Order.IN_ORDER
            told = self._left, self._exchanged, (gradient,)
            self.accounts[shard_type] = make_account(*told, in_order=in_order)
        self.complete.add(shard_type)

    def _with(self, shard_type: int, gradient: str) -> dict[Partial, tuple[str, ...]]:
        """Return the partials, with a type that is complete."""
        partials = dict(self.partials)
        grown = grow(partials, shard_type, self._shards_per_lane)
        values: tuple[str, ...] = (gradient,)
        if grown.first < grown.last:
            run = Partial(lane=grown.lane, first=grown.first, last=shard_type - 1)
            values = (*partials.pop(run), *values)
        partials[grown] = values
        return partials

    def _begin(self, early: EarlyReduction[Group], gradient: str) -> None:
        """Send what there will be once the last type is complete, of this gradient."""
        partials = self._with(early.partial.last, gradient)
        own = {s.partial: partials[s.partial] for s in early.table if s.index == early.index}
        # The reduction tells that its group has ended.
        with contextlib.suppress(GroupEnded):
            self._begun = early.group, early.table, early.group.start_exchange(own)

    def _scattered(
        self, group: Group, table: Sequence[Supply], own: dict[Partial, tuple[str, ...]]
    ) -> Steps[list[dict[Partial, tuple[str, ...]]]]:
        """Return what each member supplies."""
        if self._begun is not None and self._begun[:2] == (group, tuple(table)):
            started = self._begun[2]
            self._begun = None
        else:
            self.give_up()
            started = group.start_exchange(own)
        return (yield from group.finish_exchange(started))

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        between: Callable[[], Steps[None]],
    ) -> Steps[None]:
        """Reduce over the position's members: scatter to owners, sum, gather.

        Args:
            group: the position's members; None when there is only this one.
            table: supplies in canonical order.
            members: their indices, in the group's order.
            index: this one's.
            between: called between the two exchanges.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        own = {s.partial: self.partials[s.partial] for s in table if s.index == index}
        came = [own] if group is None else (yield from self._scattered(group, table, own))
        yield from between()
        total = self._sum(table, members, came)
        parts = [total]
        if group is not None:
            parts = yield from group.finish_exchange(group.start_exchange(total))
        # Each owner sends its chunks: the whole is right if all of them summed the same.
        self.reduced = total if set(parts) == {total} else terms.term("mixed", tuple(parts))

    @staticmethod
    def _sum(
        table: Sequence[Supply],
        members: Sequence[int],
        came: Sequence[dict[Partial, tuple[str, ...]]],
    ) -> str:
        values: list[str] = []
        for supply in table:
            peer = members.index(supply.index) if len(came) > 1 else 0
            # A rank with another table sends other rows; sizes would not even fit.
            values += came[peer].get(supply.partial, ("missing",))
        return terms.reduced(tuple(values))

    def gradient_digest(self) -> str:
        """Return the term of the reduced gradient."""
        return terms.gradient_digest(self.reduced)

    def apply(self, scale: float, factors: Mapping[str, float]) -> None:
        """Apply the reduced gradient; ``factors`` are those of the learning rate, by block."""
        assert self.reduced is not None
        boosts = terms.boosts_in(self.blocks, factors)
        applied = terms.applied_end if self.has_own else terms.applied
        self.params = applied(self.params, self.reduced, scale, boosts)

    def make_ballot(self, table: Iterable[Supply], index: int, step: int) -> Ballot:
        """Return what enters the vote of member ``index``, to whom the table credits types."""
        self.judge()
        return Ballot(
            norms_sq=terms.norms_sq(self.blocks, self.reduced),
            gradient=self.gradient_digest(),
            copies=terms.term("copies", self.stage, step),
            stats=self._stats(table, index, step),
            bad=self.bad_types(),
        )

    def final_digests(self, version: int, masters: str, data: str) -> FinalDigests:
        """Return the terms at the end of the job."""
        return FinalDigests(
            stage=self.stage,
            inner=self.inner,
            version=version,
            params=self.params,
            masters=masters,
            optimizer=self.params,
            data=data,
        )

    def _stats(self, table: Iterable[Supply], index: int, step: int) -> tuple[TypeStat, ...]:
        """Of the types that the table credits to member ``index``."""
        return tuple(
            self._stat(shard_type, step)
            for supply in table
            if supply.index == index
            for shard_type in range(supply.partial.first, supply.partial.last + 1)
        )

    def _stat(self, shard_type: int, step: int) -> TypeStat:
        first = self.position == 0
        last = (self.stage, self.inner) == (self._stages - 1, 0)
        if shard_type not in self.complete:
            raise KeyError(f"type {shard_type} of step {step} is supplied without its statistics")
        return TypeStat(
            type=shard_type,
            loss_sum=shard_type + 0.5 + step if last else None,
            tokens=terms.TOKENS if last else None,
            data=terms.term("data", step, shard_type) if first else None,
            statistics=terms.counted(self.stage, step, shard_type) if self.inner == 0 else (),
        )


def _key(action: Action) -> Key:
    return action.type, action.micro_batch, action.visit
