"""A reduction that goes on while the last type of its cell is still computed.

A thread runs the same reduction as ever, and waits before each bucket until the backward pass
has left all of it. So what is sent is the same, in the same order. If the type does not become
complete, the reduction is given up: partials were only read, and nobody has the result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from mainstay_core.rank.connections import GroupEnded
from mainstay_core.rank.early import EarlyReduction
from mainstay_core.rank.steps.step_plan import Supply
from mainstay_train.base.background import Background
from mainstay_train.comm.group import Group
from mainstay_train.exact.layout import StageLayout
from mainstay_train.exact.reduction import PartialStore, Reducer, SumNow

logger = logging.getLogger(__name__)

GIVEN_UP = "a reduction that had begun was given up"


class BegunReduction:
    """One reduction under way, begun when all types but the last are complete.

    Its methods are for the thread that computes.

    Args:
        early: what is reduced.
        layout: of the stage.
        store: holds the partials that are complete; the last type comes to be in its scratch.
        reducer: reduces; nobody else uses it until the reduction has ended.
        worker: where it runs.
        placed: called there, with the first element of each bucket whose sum is complete.
        within: entered there for all that is computed; None: nothing is.
        arrived: called there with all that comes from others; None: nobody looks at it.
        sum_now: called there with each sum that others get (:meth:`Reducer.reduce`).
    """

    def __init__(
        self,
        early: EarlyReduction[Group],
        layout: StageLayout,
        store: PartialStore,
        reducer: Reducer,
        worker: Background,
        placed: Callable[[int], None],
        within: AbstractContextManager[object] | None = None,
        arrived: Callable[[torch.Tensor], None] | None = None,
        sum_now: SumNow | None = None,
    ) -> None:
        self._within, self._arrived, self._sum_now = within, arrived, sum_now
        self._early, self._layout, self._store, self._reducer = early, layout, store, reducer
        self._placed = placed
        own = [s.partial for s in early.table if s.index == early.index]
        self._partials = {p: store.partials[p] for p in own if p != early.partial}
        self._partials[early.partial] = store.scratch
        self._changed = threading.Condition()
        self._there_from = layout.size
        """Elements from here on are there."""
        self._has_sent = self._given_up = False
        self._error: BaseException | None = None
        self._over = threading.Event()
        worker.submit(self._run)

    def deliver(self, block: int) -> None:
        """A block's weights, and those of all blocks behind it, have the last type's gradients."""
        start = self._layout.offsets[block]
        self._store.join_run(self._early.partial.last, slice(start, self._there_from))
        with self._changed:
            self._there_from = start
            self._changed.notify_all()

    def is_for(self, group: Group | None, table: Sequence[Supply], members: Sequence[int]) -> bool:
        """Whether it reduces just that."""
        early = self._early
        return (early.group, early.table, early.members) == (group, tuple(table), tuple(members))

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def finish(self) -> None:
        """Wait until it has ended.

        Raises:
            GroupEnded: the group ended before; partials are as before.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """End it without a result. If something has been sent already, its group ends as well."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        if self._has_sent and not self._over.is_set():
            self._early.group.shutdown(GIVEN_UP)
        self._over.wait()
        if not isinstance(self._error, GroupEnded | None):
            logger.error("an early reduction failed before it was given up", exc_info=self._error)

    def _run(self) -> None:
        early = self._early
        try:
            self._reducer.reduce(
                early.group,
                early.table,
                early.members,
                early.index,
                self._partials,
                await_piece=self._await_piece,
                placed=self._placed,
                within=self._within,
                arrived=self._arrived,
                sum_now=self._sum_now,
            )
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def _await_piece(self, start: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._there_from <= start)
            if self._given_up:
                raise GroupEnded(GIVEN_UP)
            self._has_sent = True
