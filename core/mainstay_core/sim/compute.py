"""A stage's arithmetic on terms: the program of a step, partials, the reduction.

Runs the actions of :func:`mainstay_core.program.compile_compute` as
``mainstay_train.interpreter`` does, and the two exchanges of
``mainstay_train.reduction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mainstay_core.messages import Partial, TypeStat
from mainstay_core.partials import grow
from mainstay_core.program import Action, Op, compile_compute
from mainstay_core.settle import Supply
from mainstay_core.sim import terms
from mainstay_core.sim.engine import Steps
from mainstay_core.sim.groups import Group

Hook = Callable[[Action], Steps[None]]
"""Before each action."""
FORWARD, BACKWARD = 0, 1


class Compute:
    """What computes one stage: state, partials, interpreter and reducer of one cell.

    Args:
        stage: which.
        stages: of a chain.
        shards_per_lane: types of a lane.
        micro_batches: per type.
        hook: called before each action.
    """

    def __init__(
        self, stage: int, stages: int, shards_per_lane: int, micro_batches: int, hook: Hook
    ) -> None:
        self.stage, self._stages = stage, stages
        self._shards_per_lane, self._micro_batches = shards_per_lane, micro_batches
        self._hook = hook
        self.params = ""
        self.reduced: str | None = None
        self.partials: dict[Partial, tuple[str, ...]] = {}
        self.complete: set[int] = set()
        """Types whose statistics are known."""

    def held(self) -> tuple[Partial, ...]:
        """Complete partials."""
        return tuple(sorted(self.partials))

    def drop_held(self) -> None:
        """Forget all partials."""
        self.partials.clear()
        self.complete.clear()

    def run(self, types: Sequence[int], step: int, group: Group | None) -> Steps[None]:
        """Run the types through the stage; complete ones are held, whatever happens.

        Raises:
            GroupEnded: the chain broke.
        """
        flows: dict[tuple[int, int], list[str]] = {}
        done: dict[int, list[tuple[str, str, str]]] = {}
        sends: list[tuple[int, int]] = []
        stage = self.stage
        for action in compile_compute(types, self._micro_batches, stage, self._stages):
            yield from self._hook(action)
            key = (action.type, action.micro_batch)
            tag = 2 * (action.type * self._micro_batches + action.micro_batch)
            op = action.op
            if op is Op.FORWARD:
                if stage == 0:
                    flows[key] = [terms.sample(step, *key)]
                flow = flows[key]
                flow.append(terms.forward(stage, flow[0], self.params))
            elif op is Op.BACKWARD_INPUT:
                flow = flows[key]
                gradient = flow[2] if stage < self._stages - 1 else ""
                of_type = done.setdefault(action.type, [])
                of_type.append((flow[0], gradient, self.params))
                flow[1:] = [terms.backward(stage, flow[0], gradient, self.params)]
            elif op is Op.BACKWARD_WEIGHT:
                del flows[key]
                if action.micro_batch == self._micro_batches - 1:
                    self._complete(action.type, terms.weight_gradient(tuple(done[action.type])))
            else:
                assert group is not None
                if op is Op.RECV_F:
                    flows[key] = [(yield from group.receive(stage - 1, tag + FORWARD))]
                elif op is Op.RECV_B:
                    flows[key].append((yield from group.receive(stage + 1, tag + BACKWARD)))
                elif op is Op.SEND_F:
                    yield from group.send(flows[key][1], stage + 1, tag + FORWARD)
                    sends.append((stage + 1, tag + FORWARD))
                elif op is Op.SEND_B:
                    yield from group.send(flows[key][1], stage - 1, tag + BACKWARD)
                    sends.append((stage - 1, tag + BACKWARD))
        for peer, tag in sends:
            assert group is not None
            yield from group.finish(peer, tag)

    def _complete(self, shard_type: int, gradient: str) -> None:
        grown = grow(self.partials, shard_type, self._shards_per_lane)
        values: tuple[str, ...] = (gradient,)
        if grown.first < grown.last:
            run = Partial(lane=grown.lane, first=grown.first, last=shard_type - 1)
            values = (*self.partials.pop(run), *values)
        self.partials[grown] = values
        self.complete.add(shard_type)

    def reduce(
        self,
        group: Group | None,
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        between: Callable[[], Steps[None]],
    ) -> Steps[None]:
        """Reduce over the stage's cells: scatter to owners, sum, gather.

        Args:
            group: the stage's cells; None when there is only this one.
            table: supplies in canonical order.
            members: the cells' member indices, in the group's order.
            index: this cell's.
            between: called between the two exchanges.

        Raises:
            GroupEnded: the group ended before it completed.
        """
        own = {s.partial: self.partials[s.partial] for s in table if s.index == index}
        came: list[dict[Partial, tuple[str, ...]]] = [own]
        if group is not None:
            came = yield from group.exchange([own] * len(members))
        yield from between()
        total = self._sum(table, members, index, came)
        parts = [total] if group is None else (yield from group.exchange([total] * len(members)))
        # Each owner sends its chunks: the whole is right if all of them summed the same.
        self.reduced = total if set(parts) == {total} else terms.term("mixed", tuple(parts))

    @staticmethod
    def _sum(
        table: Sequence[Supply],
        members: Sequence[int],
        index: int,
        came: Sequence[dict[Partial, tuple[str, ...]]],
    ) -> str:
        values: list[str] = []
        for supply in table:
            peer = members.index(supply.index) if len(came) > 1 else 0
            # A rank with another table sends other rows; sizes would not even fit.
            values += came[peer].get(supply.partial, ("missing",))
        return terms.reduced(tuple(values))

    def stats(self, table: Iterable[Supply], index: int, step: int) -> tuple[TypeStat, ...]:
        """Of the types that the table credits to member ``index``."""
        last = self.stage == self._stages - 1
        return tuple(
            self._stat(shard_type, step, last=last)
            for supply in table
            if supply.index == index
            for shard_type in range(supply.partial.first, supply.partial.last + 1)
        )

    def _stat(self, shard_type: int, step: int, *, last: bool) -> TypeStat:
        if shard_type not in self.complete:
            raise KeyError(f"type {shard_type} of step {step} is supplied without its statistics")
        return TypeStat(
            type=shard_type,
            loss_sum=shard_type + 0.5 + step if last else None,
            tokens=4 if last else None,
            data=terms.term("data", step, shard_type) if self.stage == 0 else None,
        )


def describe(value: Any) -> str:
    """Return a value in a few characters, for traces."""
    return str(value)[:8]
