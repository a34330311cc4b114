"""Makes waits for collectives on an inner mesh end with their group, though gloo loses operations.

torch waits for a collective of a user's code in C++, where nobody looks whether the group stands.
gloo can lose an operation for ever (:mod:`mainstay_train.comm.gloo`): when a rank of a cell dies or
leaves, the others would stay in it until the operation's own timeout. So over gloo the mesh runs on
a process group that hands each collective to torch's own, and waits for it as a group does.

gloo reads host memory. torch copies a device's tensors there for most collectives, but not to
gather them into one tensor: there its thread reads the device's addresses, and the process dies.
So all of them are copied here, as a group copies what it exchanges.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from mainstay_core.rank.connections import GroupEnded
from mainstay_train.comm.group import Group

COLLECTIVES = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)
"""What torch calls of a process group, by the names of all its releases. The rest is its own."""
SILENT = (
    "_reduce_scatter_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Collectives of which gloo never says that they are complete: who has waited knows."""
MESSAGES = ("send", "recv", "recv_anysource")
"""A wait for a message that is given up ends the group's connections in gloo."""


class _Stage:
    """The tensors of a collective, where the backend of a group can reach them.

    Args:
        group: whose backend runs the collective.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of what the collective writes to: the caller's tensor, and the copy of it."""
        self._read: list[torch.Tensor] = []
        """Copies that it reads: kept until it is over."""

    def put(self, value: Any, *, written: bool) -> Any:
        """Return an argument of the collective with tensors that the backend can reach.

        Args:
            value: a tensor, a list of what may be an argument, or anything else, which stays.
            written: whether the collective writes to it.
        """
        if isinstance(value, list | tuple):
            return [self.put(each, written=written) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        with torch.no_grad():
            staged = self._group.staged(value)
        if written and staged is not value:
            self._copies.append((value, staged))
        elif staged is not value:
            self._read.append(staged)
        return staged

    @property
    def is_there(self) -> bool:
        """Whether the caller's tensors have what the backend's have."""
        return not self._copies

    def fetch(self) -> None:
        """Copy what the collective has written to the caller's tensors, once."""
        copies, self._copies = self._copies, []
        self._read.clear()
        with torch.no_grad():
            for tensor, staged in copies:
                tensor.copy_(staged)


class InterruptibleWork(distributed._Work):
    """A collective or message under way, whose wait ends when its group has ended.

    Args:
        work: of torch's own group.
        group: of which it is.
        stage: its tensors.
        looks: whether it is a collective. A process that cannot be got out of a message's wait ends
            itself (:mod:`mainstay_train.comm.group`).
    """

    def __init__(self, work: Any, group: Group, stage: _Stage, *, looks: bool) -> None:
        super().__init__()
        self._work, self._group, self._stage, self._looks = work, group, stage, looks
        self._left = ""
        """Why nobody can wait for it any more; empty while its group is that of the mesh."""

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective is over.

        Args:
            timeout: not used: the group's timeout for one operation holds.

        Raises:
            RuntimeError: the group has ended, or the backend says what is wrong.
        """
        del timeout
        if self._left:
            raise RuntimeError(self._left)
        try:
            self._group.finish_collective(self._work, looks=self._looks)
        except GroupEnded as end:
            # torch hands an error of a backend on as this kind, and so do we.
            raise RuntimeError(end.why) from end
        self._stage.fetch()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over, and the caller's tensors have what it wrote if it was.

        As torch means it, also of one that has failed: a wait says so.
        """
        return bool(self._left) or (self._stage.is_there and bool(self._work.is_completed()))

    @property
    def is_over(self) -> bool:
        """Whether :meth:`wait` would return at once, or raise."""
        # Of the backend's work: what is left to copy holds nobody up.
        return bool(self._left or self._work.is_completed()) or self._group.ended is not None

    def let_go(self) -> list[Any]:
        """Give up what it refers to, for the caller to drop: a wait raises from now on.

        torch keeps a collective for which nobody has waited until the process ends. What it refers
        to would live as long: the group's sockets, and three threads that are never idle.
        """
        if self._left:
            return []
        held = [self._work, self._group, self._stage]
        self._left = self._group.ended or f"{self._group.name}: this rank has left it"
        del self._work, self._group, self._stage
        return held

    def get_future(self) -> Any:
        """Return what torch's own work has.

        Raises:
            RuntimeError: that would be there before the caller's tensors are.
        """
        self._require_there()
        return self._work.get_future()

    def result(self) -> Any:
        """Return what torch's own work has; raises as :meth:`get_future` does."""
        self._require_there()
        return self._work.result()

    def _require_there(self) -> None:
        if self._left:
            raise RuntimeError(self._left)
        if not self._stage.is_there:
            raise RuntimeError("a collective over gloo has its result on a device after wait()")


class InterruptibleGroup(distributed.ProcessGroup):
    """A process group of torch, as its collectives are awaited by a group of ours.

    Args:
        whole: torch's own.
        group: of which it is.
    """

    def __init__(self, whole: Any, group: Group) -> None:
        # The form that Python may subclass; its stub lacks it.
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self._whole, self._of = whole, group
        self.newest: Callable[[], InterruptibleWork | None] = lambda: None
        """Returns what was started last, while torch keeps it, if that tells its end."""
        self.kept = weakref.WeakSet[InterruptibleWork]()
        """Those of its collectives and messages to which somebody still refers."""

    def let_go(self) -> list[Any]:
        """Have each collective and message give up what it refers to, for the caller to drop."""
        return [held for work in list(self.kept) for held in work.let_go()]


def newest_of(name: str) -> InterruptibleWork | None:
    """Return the collective that was started last on a group.

    Args:
        name: by which torch knows the group.

    Returns:
        None: nobody can see whether it is over.
    """
    resolve: Any = distributed_c10d._resolve_process_group  # newer torch has a type for names
    group = resolve(name)
    return group.newest() if isinstance(group, InterruptibleGroup) else None


def _handed_on(name: str) -> Callable[..., InterruptibleWork]:
    tells = name in COLLECTIVES

    def start(self: Any, *args: Any, **named: Any) -> InterruptibleWork:
        stage = _Stage(self._of)
        # torch puts what a collective writes to first. Only a message that is sent writes to none.
        writes = name != "send"
        given = [stage.put(each, written=writes and at == 0) for at, each in enumerate(args)]
        options = {
            key: stage.put(each, written=writes and not args and not key.startswith("input"))
            for key, each in named.items()
        }
        begun = getattr(self._whole, name)(*given, **options)
        work = InterruptibleWork(begun, self._of, stage, looks=name not in MESSAGES)
        self.kept.add(work)
        # Weakly: its tensors go when nobody waits for it any more.
        self.newest = weakref.ref(work) if tells else lambda: None
        return work

    start.__name__ = name
    return start


for _name in (*COLLECTIVES, *SILENT, *MESSAGES):
    setattr(InterruptibleGroup, _name, _handed_on(_name))
