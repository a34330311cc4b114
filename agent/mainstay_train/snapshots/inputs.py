"""Reads ahead what neighbours sent, while a replay computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from mainstay_core.wire.segments import SegmentKey

AHEAD = 4
"""Tensors that are read before they are needed: enough to have one there whenever the stage asks,
and little beside what it keeps for its backward."""

Read = Callable[[torch.Tensor], None]
"""Reads one tensor into memory of the host.

Raises:
    Unusable: there is no good copy of it.
"""


class Wanted(NamedTuple):
    """A tensor that the replay will ask for."""

    key: SegmentKey
    read: Read


class Inputs:
    """The tensors of a replay, in the order in which it asks for them.

    Args:
        wanted: all of them, in that order.
        make: returns memory of the host for one.
        interrupt: wakes whoever reads and waits, once nobody wants more.
    """

    def __init__(
        self,
        wanted: Iterator[Wanted],
        make: Callable[[], torch.Tensor],
        interrupt: Callable[[], None],
    ) -> None:
        self._wanted, self._make, self._interrupt = wanted, make, interrupt
        self._changed = threading.Condition()
        self._there: deque[tuple[SegmentKey, torch.Tensor]] = deque()
        self._free: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self.closed = False
        """Whether nobody wants more."""
        self.thread = threading.Thread(target=self._run, name="boundary inputs", daemon=True)
        """Reads."""

    def start(self) -> None:
        """Begin to read."""
        self.thread.start()

    def take(self, key: SegmentKey, into: torch.Tensor) -> None:
        """Wait for the next tensor, and copy it.

        Args:
            key: whose turn it is.
            into: receives it.

        Raises:
            Unusable: there is no good copy of it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._there or self._error is not None)
            if not self._there:
                assert self._error is not None
                raise self._error
            found, tensor = self._there.popleft()
            self._changed.notify_all()
        assert found == key, "tensors are asked for in the program's order"
        into.copy_(tensor)
        with self._changed:
            self._free.append(tensor)

    def close(self) -> None:
        """Read no more; returns at once.

        A read that has begun may wait for a pod that is gone, for as long as its reader lets it. It
        ends by itself: it fills memory that is this object's alone, and nobody uses what comes.
        """
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._interrupt()

    def _run(self) -> None:
        try:
            for wanted in self._wanted:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._there) < AHEAD or self.closed)
                    if self.closed:
                        return
                    tensor = self._free.pop() if self._free else None
                tensor = self._make() if tensor is None else tensor
                wanted.read(tensor)
                with self._changed:
                    self._there.append((wanted.key, tensor))
                    self._changed.notify_all()
        except BaseException as error:  # it is raised where the tensor is taken
            with self._changed:
                self._error = error
                self._changed.notify_all()
