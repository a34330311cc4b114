"""The world of trainers in which lost stages are made anew of their neighbours.

A coordinator orders forks by the rules of the product's. What a trainer computes depends on the
history of its state, as activations pass through all stages: a partial that was held over a fork,
or a state that missed one, ends in another text.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tests.worlds.trainers import (
    Half,
    PlayedTrainers,
    Trainer,
    bits,
    initial_bits,
    type_bits,
)

from mainstay_core.planning.partials import grow
from mainstay_core.rank.events import Event, LoadFailed, LoadState, QuorumLost, StateLoaded
from mainstay_core.rank.forks.histories import digest_of, history_at
from mainstay_core.rank.forks.rules import ForkRules
from mainstay_core.rank.settle import StateAction, settle
from mainstay_core.wire.plan import Partial, Plan
from mainstay_core.wire.reinitialisation import BlockOutline, Fork, ForkOrder, History, MadePosition
from mainstay_core.wire.votes import SettleReport


@lru_cache(maxsize=5_000)
def true_states(history: History, version: int, positions: int, num_types: int) -> tuple[str, ...]:
    """States of all positions at a version, by what their history says."""
    params = [initial_bits(position) for position in range(positions)]
    for step in range(version + 1):
        for fork in history:
            if fork.version == step:
                made = {m.stage: made_bits(m, step, dict(enumerate(params))) for m in places(fork)}
                params = [made.get(position, old) for position, old in enumerate(params)]
        if step == version:
            break
        tag = digest_of(history_at(history, step))
        params = [
            bits("applied", old, bits(*(_typed(p, step, t, old, tag) for t in range(num_types))))
            for p, old in enumerate(params)
        ]
    return tuple(params)


def places(fork: Fork) -> tuple[MadePosition, ...]:
    return fork.made.positions


def made_bits(made: MadePosition, version: int, sources: dict[int, str]) -> str:
    taken = tuple((s.stage, s.weight, sources[s.stage]) for b in made.blocks for s in b.sources)
    return bits("made", version, made.stage, taken)


def _typed(position: int, step: int, shard_type: int, params: str, tag: str) -> str:
    return bits(type_bits(position, step, shard_type, params), tag)


class ForkedTrainers(PlayedTrainers):
    """A run in which the loss of an inner stage is answered by a fork."""

    _seen: History = ()
    """That of the trainer whose move it is."""

    @property
    def rules(self) -> ForkRules:
        names = range(self.shape.stages)
        return ForkRules(
            outline=tuple(
                tuple(BlockOutline(name=f"{part}{stage}", kind=part) for part in "ab")
                for stage in names
            )
        )

    def _bring_up(self, life: str) -> None:
        super()._bring_up(life)
        trainer = self.trainers[life]
        trainer.state = replace(trainer.state, fork_rules=self.rules)

    def _ordered(self, plan: Plan) -> Plan:
        """As ``coordinator.seating`` orders forks; whether it has heard of a settle is drawn."""
        old = self.plan
        if old is None:
            return plan
        plan = replace(plan, lineage=old.lineage)
        known = {
            m.incarnation: self.trainers[str(m.incarnation)].state.settled == old.quorum.id
            and self.rng.random() < 0.8
            for m in old.members
        }
        is_open = old.fork is not None and not all(known.values())
        has_state = {m.incarnation for m in old.members if not m.joining or known[m.incarnation]}
        lost = [
            position
            for position, members in enumerate(plan.positions)
            if not any(m.incarnation in has_state and not m.joining for m in members)
        ]
        last = self.shape.stages - 1
        possible = all(0 < p < last and p - 1 not in lost and p + 1 not in lost for p in lost)
        if plan.planned or (lost and not possible) or not (lost or is_open):
            return plan
        assert old.fork is not None or lost
        positions = tuple(lost) if lost or old.fork is None else old.fork.positions
        since = old.fork.since if is_open and old.fork is not None else old.lineage
        self.happened.add("fork" if not is_open else "fork again")
        return replace(
            plan, lineage=old.lineage + 1, fork=ForkOrder(positions=positions, since=since)
        )

    def _wait(self, trainer: Trainer) -> Event | Half | None:
        self._seen = trainer.state.history
        making = isinstance(trainer.pending, LoadState) and trainer.pending.making is not None
        if making:
            assert isinstance(trainer.pending, LoadState)
            return self._make(trainer, trainer.pending)
        return super()._wait(trainer)

    def _make(self, trainer: Trainer, action: LoadState) -> Event | None:
        making = action.making
        assert making is not None
        if trainer.gather.client.ended is not None:
            return QuorumLost.of(trainer.gather.client.ended)
        sources = {}
        for beside in making.beside:
            for life in (self.trainers[self._life(trainer, i)] for i in beside.members):
                if not life.alive or life.adopted is not trainer.adopted:
                    continue
                plan = life.state.plan
                if plan is None or life.state.settled != plan.quorum.id:
                    return None
                assert life.state.version == action.version, "a source went on without its maker"
                assert not beside.expected or beside.expected == life.params
                sources[beside.position] = life.params
                break
            else:
                return LoadFailed("no source is left")
        trainer.params = made_bits(making.made, action.version, sources)
        self.happened.add("made")
        return StateLoaded(trainer.params)

    def _truth(self, position: int, version: int) -> str:
        shape = self.shape
        return true_states(self._seen, version, shape.positions, shape.num_types)[position]

    def _check_end(self) -> None:
        assert self.plan is not None
        states = [self.trainers[str(m.incarnation)].state for m in self.plan.members]
        finished = [m for m in self.plan.members if self._has_finished(m)]
        histories = {self.trainers[str(m.incarnation)].state.history for m in finished}
        assert len(histories) == 1, "one job has two histories"
        (self._seen,) = histories
        assert states
        super()._check_end()

    def _check_settle(self, plan: Plan, reports: tuple[SettleReport, ...]) -> None:
        """A committed step is never lost where all but what is made anew is there."""
        stayed = [r for r in reports if r.valid and r.settled >= plan.members[r.index].since]
        outcome = settle(plan, self.shape.shards_per_lane, reports, fork_rules=self.rules)
        self.happened |= {str(a) for a in outcome.actions}
        if StateAction.LOAD in outcome.actions:
            return
        if outcome.fork is not None:
            assert outcome.version >= max(r.version for r in stayed), outcome.reason
            assert plan.fork is not None

    def _complete(self, trainer: Trainer, position: int, shard_type: int) -> None:
        state = trainer.state
        grown = grow(trainer.partials, shard_type, self.shape.shards_per_lane)
        tag = digest_of(history_at(state.history, state.version))
        value = (_typed(position, state.version, shard_type, trainer.params, tag),)
        if grown.first < grown.last:
            run = Partial(lane=grown.lane, first=grown.first, last=shard_type - 1)
            value = trainer.partials.pop(run) + value
        trainer.partials[grown] = value
