"""The blocks of a pipeline's ends that a trainer guards, and those of its own that others guard.

A guard applies the end's reduced gradient by the same code as its owners, so it has the same bits,
moments included. It uses memory for the blocks, their optimizer's state and one gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.serving import Source, Wanted
from mainstay_core.reinitialisation.guards import guarded_blocks
from mainstay_core.wire.reinitialisation import Outline
from mainstay_core.wire.votes import Commit, GuardedDigest
from mainstay_train.base import device as devices
from mainstay_train.comm.group import Group
from mainstay_train.comm.operations import Message
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.training import Training
from mainstay_train.exact.optimizer import Boosts, StageState
from mainstay_train.exact.portions import Portion
from mainstay_train.state.heal import HealClient


@dataclass(slots=True, kw_only=True)
class _Copy:
    """The copy of one end's blocks."""

    state: StageState
    statistics: tuple[slice, ...]
    """Where what they count lies in a commit."""
    portion: Portion
    gradient: torch.Tensor
    """Their reduced gradient in the step at hand, flat."""


class GuardCopies:
    """The copies of other stages' blocks that one trainer keeps up to date.

    Args:
        training: allocates them.
        outline: the blocks of every stage; empty if nothing is ever made anew.
        engine: returns that of this trainer's own stage.
        held: returns what counts of the copies (any thread).
    """

    def __init__(
        self,
        training: Training,
        outline: Outline,
        engine: Callable[[], Engine],
        held: Callable[[], Sequence[GuardedDigest]],
    ) -> None:
        self._training, self._outline = training, outline
        self._engine, self._held = engine, held
        self._copies: dict[int, _Copy] = {}
        """By the end's stage."""
        self._own: tuple[StageState, frozenset[str], Portion] | None = None
        self._lock = threading.Lock()
        """Guards the portion of the own stage."""

    def served(self, end: int, own: StageState) -> Portion | None:
        """Return what is served of an end's blocks (any thread); None: nothing here is right.

        Args:
            end: its stage.
            own: the state of this trainer's own stage, which may be that.
        """
        copy = self._copies.get(end)
        if copy is not None and end in {held.stage for held in self._held()}:
            return copy.portion
        names = guarded_blocks(self._outline, end)
        portion = self._portion(own, names)
        return portion if {flat.name for flat in portion.flats()} == set(names) else None

    def _portion(self, own: StageState, names: Collection[str]) -> Portion:
        wanted = frozenset(names)
        with self._lock:
            if self._own is None or self._own[0] is not own or self._own[1] != wanted:
                self._own = own, wanted, Portion(own, names)
            return self._own[2]

    def own_digest(self, step: int) -> GuardedDigest | None:
        """Return the digest of what others guard of this trainer's stage; None if that is nothing.

        Args:
            step: at hand.
        """
        engine = self._engine()
        names = guarded_blocks(self._outline, engine.stage)
        if not names:
            return None
        masters, rest = self._portion(engine.state, names).digests(step)
        return GuardedDigest(stage=engine.stage, masters=masters, rest=rest)

    def give(self, group: Group, peers: Sequence[int]) -> None:
        """Send the reduced gradient of what others guard of this stage: its bytes once to each.

        Args:
            group: of owners and guards.
            peers: the guards' numbers there.

        Raises:
            GroupEnded: a guard is gone.
        """
        engine = self._engine()
        names = guarded_blocks(self._outline, engine.stage)
        gradients = [
            gradient
            for block, gradient in zip(engine.state.blocks, engine.reduced_blocks(), strict=True)
            if block.name in names
        ]
        pending = [
            group.send(Message(gradient, peer, number))
            for peer in peers
            for number, gradient in enumerate(gradients)
        ]
        for sent in pending:
            group.finish(sent)

    def take(self, group: Group, end: int, peer: int) -> None:
        """Receive the reduced gradient of what is guarded of an end.

        Args:
            group: of owners and guards.
            end: its stage.
            peer: the owner's number there.

        Raises:
            GroupEnded: the owner is gone, or was before the device had all of it.
        """
        copy = self._made(end)
        try:
            views = copy.state.layout.block_views(copy.gradient)
            pending = [group.receive(Message(v, peer, number)) for number, v in enumerate(views)]
            for received in pending:
                group.finish(received)
            # A device may still be at them, and what is aborted there ends like what has come.
            group.wait_for(devices.moment(copy.gradient.device))
        except GroupEnded:
            # What is lost on the way may still arrive, in memory that nobody uses any more.
            copy.gradient = copy.state.layout.allocate(device=copy.gradient.device)
            raise

    def copy(self, client: HealClient, sources: Sequence[Source], wanted: Wanted) -> GuardedDigest:
        """Copy what is guarded of an end from its owners.

        Raises:
            HealFailed: no source is left.
        """
        assert wanted.guarded is not None
        copy = self._made(wanted.guarded)
        client.copy(copy.state, sources=sources, wanted=wanted, expected="")
        return self._told(wanted.guarded, wanted.version)

    def keep(self, ends: Collection[int]) -> None:
        """Let go of the copies of all other ends."""
        for end in [end for end in self._copies if end not in ends]:
            del self._copies[end]

    def apply(
        self, commit: Commit, learning_rate: float, boosts: Boosts
    ) -> tuple[GuardedDigest, ...]:
        """Apply a step to all copies that count; return their digests after it.

        Args:
            commit: of the step, whose gradients are there.
            learning_rate: of the step.
            boosts: its factors, by block.
        """
        told = []
        for held in self._held():
            copy = self._copies[held.stage]
            counted = [commit.statistics[where] for where in copy.statistics] or None
            gradients = copy.state.layout.block_views(copy.gradient)
            copy.state.apply(gradients, commit.scale, learning_rate, counted, boosts=boosts)
            told.append(self._told(held.stage, commit.step + 1))
        return tuple(told)

    def _told(self, end: int, step: int) -> GuardedDigest:
        masters, rest = self._copies[end].portion.digests(step)
        return GuardedDigest(stage=end, masters=masters, rest=rest)

    def _made(self, end: int) -> _Copy:
        """Return the copy of an end's blocks; one that is new is void."""
        if end not in self._copies:
            state, statistics = self._training.build_guarded(end)
            names = [block.name for block in state.blocks]
            gradient = state.layout.allocate(device=state.blocks[0].device)
            self._copies[end] = _Copy(
                state=state,
                statistics=statistics,
                portion=Portion(state, names),
                gradient=gradient,
            )
        return self._copies[end]
