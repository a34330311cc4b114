"""States of other stages that a trainer copies, to make its own stage anew of them."""

from __future__ import annotations

from mainstay_core.rank.serving import Sources, Wanted
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.reinitialisation import MadePosition
from mainstay_train.compute.training import Training
from mainstay_train.exact.blending import make_anew
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
        if wanted.guarded is not None:
            state, _ = self._training.build_guarded(wanted.guarded)
            masters = client.copy(state, sources=sources, wanted=wanted, expected=expected)
            self._guarded |= {block.name: state for block in state.blocks}
            return masters
        stage, inner = place = divmod(wanted.position, plan.ranks_per_stage)
        if place not in self._states:
            self._states[place] = self._training.build_beside(
                stage, plan.num_stages, inner, masters_only=wanted.masters_only
            )
        return client.copy(
            self._states[place],
            sources=sources,
            wanted=wanted,
            expected=expected,
            holders=() if wanted.masters_only else holders,
        )

    def make(self, state: StageState, made: MadePosition, *, keeps_own: bool) -> str:
        """Write a state of what was copied; return its masters' digest.

        Args:
            state: of this trainer's stage.
            made: its blocks, and of what they are made.
            keeps_own: whether blocks that guards would give stay as they are.
        """
        make_anew(state, made, self._states, None if keeps_own else self._guarded)
        return masters_digest(state)

    def drop(self) -> None:
        """Free what was copied."""
        self._states, self._guarded = {}, {}
