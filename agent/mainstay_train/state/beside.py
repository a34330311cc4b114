"""States of other stages that a trainer copies, to make its own stage anew of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from mainstay_core.rank.serving import CopyOrder, Sources, Wanted
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_train.compute.training import Training
from mainstay_train.exact.blending import clear, make_anew
from mainstay_train.exact.optimizer import StageState
from mainstay_train.state.heal import HealClient, masters_digest


class BesideStates:
    """The states of other positions beside a trainer's own, while that is made of them.

    Args:
        training: allocates them.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._states: dict[tuple[int, int], StageState] = {}
        """By (stage, inner rank)."""
        self._guarded: dict[str, StageState] = {}
        """What guards had, by block."""
        self._begun: dict[Wanted, _Begun] = {}
        """First attempts that nobody has asked for yet."""
        self._is_clear = False

    def begin(
        self,
        client: HealClient,
        plan: Plan,
        orders: Sequence[CopyOrder],
        compared: Callable[[Sources], Sources],
    ) -> None:
        """Begin to copy positions, each in a thread. :meth:`copy` waits for them.

        Args:
            client: ends with the quorum.
            plan: its plan.
            orders: what is copied, and from whom.
            compared: with whose whole states a copy is compared, of those who have the state.
        """
        for order in orders:
            if order.first:
                state = self._state_for(plan, order.wanted)
                begun = _Begun(client, order.first, state, Future())
                self._begun[order.wanted] = begun
                threading.Thread(
                    target=begun.run,
                    args=(order.wanted, order.expected, compared(order.known)),
                    name=f"copy-beside-{order.wanted.position}",
                    daemon=True,
                ).start()

    def clear(self, state: StageState, made: MadePosition, *, keeps_own: bool) -> None:
        """Zero what no source gives, while copies are on their way; see :meth:`make`."""
        clear(state, made, keeps_own=keeps_own)
        self._is_clear = True

    def copy(
        self,
        client: HealClient,
        plan: Plan,
        sources: Sources,
        wanted: Wanted,
        expected: str,
        *,
        holders: Sources = (),
    ) -> str:
        """Copy a position's state, or what its member guards; return the masters' digest.

        Of a position the masters alone are copied, unless the optimizer's state is asked for, too.
        Reports name the masters' digest alone, so that state is compared with all who have it: two
        makers that copy from cells that differ would differ as well.

        Args:
            client: ends with the quorum.
            plan: its plan.
            sources: who has it.
            wanted: what is copied.
            expected: the masters' digest that reports name; "" if none does.
            holders: whose whole states are compared with a copy that has all of it; empty:
                nobody's. Guards' copies were compared by the votes.

        Raises:
            HealFailed: see :meth:`HealClient.copy`.
        """
        begun = self._begun.pop(wanted, None)
        if begun is not None:
            assert begun.sources == tuple(sources), "it begins with the first attempt"
            state, masters = begun.state, begun.copied.result()
        else:
            state = self._state_for(plan, wanted)
            masters = _copy(client, state, sources, wanted, expected, holders)
        if wanted.guarded is not None:
            self._guarded |= {block.name: state for block in state.blocks}
        return masters

    def _state_for(self, plan: Plan, wanted: Wanted) -> StageState:
        """Return where a copy goes: once a state is there, each attempt writes to it."""
        if wanted.guarded is not None:
            state, _ = self._training.build_guarded(wanted.guarded)
            return state
        stage, inner = place = divmod(wanted.position, plan.ranks_per_stage)
        if place not in self._states:
            self._states[place] = self._training.build_beside(
                stage, plan.num_stages, inner, masters_only=wanted.masters_only
            )
        return self._states[place]

    def make(self, state: StageState, made: MadePosition, *, keeps_own: bool) -> str:
        """Write a state of what was copied; return its masters' digest.

        Args:
            state: of this trainer's stage.
            made: its blocks, and of what they are made.
            keeps_own: whether blocks that guards would give stay as they are.
        """
        guarded = None if keeps_own else self._guarded
        make_anew(state, made, self._states, guarded, is_clear=self._is_clear)
        self._is_clear = False
        return masters_digest(state)

    def drop(self) -> None:
        """Free what was copied, and end what is still being copied."""
        for begun in self._begun.values():
            begun.client.shutdown("the stage is not made")
        for begun in self._begun.values():
            begun.copied.exception()  # its thread writes to memory that is freed
        self._states, self._guarded, self._begun = {}, {}, {}
        self._is_clear = False


class _Begun(NamedTuple):
    """A copy that a thread makes."""

    client: HealClient
    sources: Sources
    state: StageState
    copied: Future[str]
    """Gives the masters' digest, or raises as :meth:`HealClient.copy` does."""

    def run(self, wanted: Wanted, expected: str, holders: Sources) -> None:
        """Copy (a thread)."""
        try:
            for block in self.state.blocks[:1]:
                if block.device.type == "cuda":
                    torch.cuda.set_device(block.device)  # each thread has its own
            masters = _copy(self.client, self.state, self.sources, wanted, expected, holders)
        except BaseException as error:
            self.copied.set_exception(error)  # raised where the copy is waited for
        else:
            self.copied.set_result(masters)


def _copy(
    client: HealClient,
    state: StageState,
    sources: Sources,
    wanted: Wanted,
    expected: str,
    holders: Sources,
) -> str:
    compared = () if wanted.masters_only or wanted.guarded is not None else holders
    return client.copy(state, sources=sources, wanted=wanted, expected=expected, holders=compared)
