"""Checks that wait: SpareTrain's deferred DMR (section 3.2), as a planner decides.

A check that waits keeps the inputs and outputs of its kernel. It is executed while the trainer
waits for another stage, or at once when the budget is reached, when its memory is about to be
overwritten, and before the shard type that it belongs to counts. By then the value was used. So a
wrong one makes its type void.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mainstay_core.dmr import dynamic
from mainstay_core.dmr.dynamic import CheckQueue
from mainstay_core.dmr.profiles import WindowKind
from mainstay_train.checks.planned import Flow, Window
from mainstay_train.kernels.dispatch import key_of


@dataclass(slots=True)
class Waiting:
    """A check that waits."""

    shard_type: int
    keys: Set[int]
    """The memories that it keeps: see :func:`~mainstay_train.kernels.dispatch.key_of`."""
    size_bytes: int
    execute: Callable[[], None]
    micro_batch: int = 0
    window: str | None = None
    """The wait in which a plan has it executed at the latest; None: no plan says so."""
    expected_s: float = 0.0
    """Of its execution, as far as a plan knows it."""
    copy: Callable[[int], int | None] | None = None
    """Has it keep a copy of one of its memories in place of that, and returns the copy's key; or
    None, if that cannot be. None: it keeps no copies."""
    forget: Callable[[], None] | None = None
    """Called when it waits no longer."""

    def is_due(self, window: Window, passed: Collection[Flow]) -> bool:
        """Return whether a plan has it executed in a wait that begins.

        Args:
            window: the wait.
            passed: micro-batches whose passage is over.
        """
        flow = self.shard_type, self.micro_batch
        if window.flow == flow:
            return self.window == window.name
        return flow in passed and self.window in window.behind


class WaitingChecks:
    """The checks of a trainer that wait. One thread uses it.

    Invariant: they retain no more than the budget.

    Args:
        budget_bytes: the most that they may retain, a memory that several keep counts for each; 0:
            none waits.
        pace: called after each check that is executed in a wait: a device may be behind.
    """

    def __init__(self, budget_bytes: int, pace: Callable[[], None] = lambda: None) -> None:
        self._pace = pace
        self._queue = CheckQueue(budget_bytes=budget_bytes)
        self._untold: list[dynamic.Executed | dynamic.Grown | dynamic.Completed] = []
        """Events that the queue has not heard of: nothing follows from them but a longer queue. It
        hears of them when something may follow, as a rule when a wait begins."""
        self._untold_bytes = 0
        """By which they make it longer."""
        self._waiting: dict[str, Waiting] = {}
        self._by_key: dict[int, set[str]] = {}
        self._number = 0
        self._passed: set[Flow] = set()
        self.most_bytes = 0
        """The most that was ever retained."""

    @property
    def is_used(self) -> bool:
        """Whether checks may wait at all."""
        return self._queue.budget_bytes > 0

    @property
    def size_bytes(self) -> int:
        """What they retain now."""
        return self._queue.size_bytes + self._untold_bytes

    def __bool__(self) -> bool:
        """Return whether any check waits."""
        return bool(self._waiting)

    def add(self, check: Waiting) -> None:
        """Have a check wait; some are executed if the budget is reached."""
        name = self._enter(check)
        executed = dynamic.Executed(
            operator=name, expected_s=check.expected_s, size_bytes=check.size_bytes
        )
        self._lengthen(executed, check.size_bytes)

    def begin(self, check: Waiting) -> str:
        """Have a piece wait of which more is to be executed; return its name."""
        return self._enter(check)

    def grow(self, name: str, keys: Collection[int], size_bytes: int) -> None:
        """Have a piece keep more; it and others are executed if the budget is reached.

        Args:
            name: of the piece, which waits.
            keys: further memories that it keeps.
            size_bytes: what it retains more.
        """
        check = self._waiting[name]
        check.keys |= set(keys)
        check.size_bytes += size_bytes
        for key in keys:
            self._by_key.setdefault(key, set()).add(name)
        grown = dynamic.Grown(piece=name, expected_s=check.expected_s, size_bytes=size_bytes)
        self._lengthen(grown, size_bytes)

    def complete(self, name: str) -> None:
        """Say that all of a piece was executed."""
        self._lengthen(dynamic.Completed(piece=name), 0)

    def waits(self, name: str) -> bool:
        """Return whether a check still waits."""
        return name in self._waiting

    def _lengthen(
        self, event: dynamic.Executed | dynamic.Grown | dynamic.Completed, size_bytes: int
    ) -> None:
        """Have the queue hear of an event, now if its budget may be reached, else in time.

        Args:
            event: by which it becomes longer.
            size_bytes: by how much.
        """
        total = self.size_bytes + size_bytes
        if total > self._queue.budget_bytes:
            self._take(event)
            self.most_bytes = max(self.most_bytes, self._queue.size_bytes)
            return
        self.most_bytes = max(self.most_bytes, total)
        self._untold_bytes += size_bytes
        last = self._untold[-1] if self._untold else None
        match last, event:
            case (dynamic.Grown(piece=before), dynamic.Grown(piece=piece)) if before == piece:
                event = replace(event, size_bytes=last.size_bytes + size_bytes)
                self._untold.pop()
        self._untold.append(event)

    def _tell(self) -> None:
        """Have the queue hear of all events."""
        untold, self._untold, self._untold_bytes = self._untold, [], 0
        for event in untold:
            decision = dynamic.step(self._queue, event)
            assert not decision.checks, "all of it is within the budget"
            self._queue = decision.queue

    def _enter(self, check: Waiting) -> str:
        self._number += 1
        name = str(self._number)
        self._waiting[name] = check
        for key in check.keys:
            self._by_key.setdefault(key, set()).add(name)
        return name

    def overwrite(self, keys: Iterable[int]) -> None:
        """Have the checks executed whose memory is about to be written, or keep a copy of it."""
        needed: set[str] = set()
        for key in keys:
            for name in tuple(self._by_key.get(key, ())):
                if name not in needed and not self._copies(name, key):
                    needed.add(name)
        if needed:
            self._take(dynamic.Needed(operators=tuple(sorted(needed, key=int))))

    def _copies(self, name: str, key: int) -> bool:
        """Have a check keep a copy of a memory, if it can."""
        check = self._waiting[name]
        copy = None if check.copy is None else check.copy(key)
        if copy is None:
            return False
        check.keys = (check.keys - {key}) | {copy}
        self._leave(name, key)
        self._by_key.setdefault(copy, set()).add(name)
        return True

    def settle(self, shard_type: int) -> None:
        """Execute the checks of a type that is about to count."""
        names = tuple(n for n, check in self._waiting.items() if check.shard_type == shard_type)
        if names:
            with _disable_current_modes():  # the caller may be in a scope of checks
                self._take(dynamic.Needed(operators=names))

    def settle_all(self, types: Iterable[int], void: set[int]) -> None:
        """Execute the checks of complete types, and forget all others: their types do not count.

        Args:
            types: that are about to count.
            void: gets those of which a check cannot be executed.

        Raises:
            Exception: what a check has raised; all others were executed.
        """
        errors = []
        for shard_type in types:
            try:
                self.settle(shard_type)
            except Exception as error:
                void.add(shard_type)
                errors.append(error)
        self.drop()
        if errors:
            raise errors[0]

    def passed(self, flow: Flow) -> None:
        """Note that a micro-batch's passage is over."""
        self._passed.add(flow)

    def use(
        self,
        is_open: Callable[[], bool],
        window: Window | None = None,
        goes_on: Callable[[], bool] = lambda: True,
        kind: WindowKind = WindowKind.INTER,
    ) -> None:
        """Execute what a plan says of a window; then one after the other, in order, while it lasts.

        Args:
            is_open: whether it lasts.
            window: None: no plan says anything of it.
            goes_on: whether the program goes on behind it, so that what is due is executed.
            kind: whether it waits for another stage or cell, or for a rank of its own cell.
        """
        due = [
            name
            for name, check in self._waiting.items()
            if window is not None and check.is_due(window, self._passed)
        ]
        if due:
            self._take(dynamic.Needed(operators=tuple(due)), goes_on)
            if not goes_on():
                return
        if not self._waiting or not is_open():
            return
        try:
            self._take(dynamic.WindowOpened(kind=kind, length_s=None))
            while self._waiting and is_open():
                self._take(dynamic.CheckDone())
                self._pace()
        finally:
            self._take(dynamic.WindowClosed())

    def drop(self) -> None:
        """Forget all: what they belong to does not count."""
        self._queue = CheckQueue(budget_bytes=self._queue.budget_bytes)
        self._untold, self._untold_bytes = [], 0
        for check in self._waiting.values():
            if check.forget is not None:
                check.forget()
        self._waiting.clear()
        self._by_key.clear()
        self._passed.clear()

    def _take(self, event: dynamic.Event, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Execute what follows from an event; what raises, and what comes behind it, still waits.

        So a type counts only when all its checks were executed.

        Args:
            event: for the queue.
            goes_on: whether more is executed; what is left waits as before.
        """
        if self._untold:
            self._tell()
        decision = dynamic.step(self._queue, event)
        self._queue = decision.queue
        left = [chosen.operator for chosen in decision.checks]
        try:
            while left and goes_on():
                self._waiting[left[0]].execute()
                self._forget(left.pop(0))
        finally:
            if left:
                self._keep(left)

    def _keep(self, names: Collection[str]) -> None:
        """Have checks wait on that were taken from the queue and not executed."""
        kept = (*self._queue.growing, *self._queue.waiting)
        still = {*names, *(check.operator for check in kept)}
        waiting = tuple(
            dynamic.Executed(
                operator=name, expected_s=check.expected_s, size_bytes=check.size_bytes
            )
            for name, check in self._waiting.items()
            if name in still
        )
        size_bytes = sum(check.size_bytes for check in waiting)
        self._queue = replace(self._queue, waiting=waiting, growing=(), size_bytes=size_bytes)

    def _forget(self, name: str) -> None:
        """Let go of what a check keeps."""
        check = self._waiting.pop(name)
        for key in check.keys:
            self._leave(name, key)
        if check.forget is not None:
            check.forget()

    def _leave(self, name: str, key: int) -> None:
        names = self._by_key[key]
        names.discard(name)
        if not names:
            del self._by_key[key]


def detached(value: Any) -> Any:
    """Return an argument whose tensors keep their memory, and nothing of a graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(detached(part) for part in value)
    return value


def kept_by(tensors: Sequence[torch.Tensor], given: frozenset[int]) -> tuple[frozenset[int], int]:
    """Return the memories of tensors, and how many bytes keeping them takes.

    Args:
        tensors: that are kept.
        given: memories that are there anyway, as those of parameters.
    """
    sizes = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return frozenset(sizes), sum(size for key, size in sizes.items() if key not in given)
