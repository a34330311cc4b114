"""Makes waits for collectives on an inner mesh end with their group, though gloo loses operations.

torch waits for a collective of a user's code in C++, where nobody looks whether the group stands.
gloo can lose an operation for ever (:mod:`mainstay_train.comm.gloo`): when a rank of a cell dies or
leaves, the others would stay in it until the operation's own timeout. So over gloo the mesh runs on
a process group that hands each collective to torch's own, and waits for it as a group does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

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


class InterruptibleWork(distributed._Work):
    """A collective or message under way, whose wait ends when its group has ended.

    Args:
        work: of torch's own group.
        group: of which it is.
        looks: whether it is a collective. A process that cannot be got out of a message's wait ends
            itself (:mod:`mainstay_train.comm.group`).
    """

    def __init__(self, work: Any, group: Group, *, looks: bool) -> None:
        super().__init__()
        self._work, self._group, self._looks = work, group, looks

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the collective is over.

        Args:
            timeout: not used: the group's timeout for one operation holds.

        Raises:
            RuntimeError: the group has ended, or the backend says what is wrong.
        """
        del timeout
        try:
            self._group.finish_collective(self._work, looks=self._looks)
        except GroupEnded as end:
            # torch hands an error of a backend on as this kind, and so do we.
            raise RuntimeError(end.why) from end
        return True

    def is_completed(self) -> bool:
        """Whether the collective is over."""
        return bool(self._work.is_completed())

    @property
    def is_over(self) -> bool:
        """Whether :meth:`wait` would return at once, or raise."""
        return self.is_completed() or self._group.ended is not None

    def get_future(self) -> Any:
        """Return what torch's own work has."""
        return self._work.get_future()

    def result(self) -> Any:
        """Return what torch's own work has."""
        return self._work.result()


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
        begun = getattr(self._whole, name)(*args, **named)
        work = InterruptibleWork(begun, self._of, looks=name not in MESSAGES)
        # Weakly: its tensors go when nobody waits for it any more.
        self.newest = weakref.ref(work) if tells else lambda: None
        return work

    start.__name__ = name
    return start


for _name in (*COLLECTIVES, *SILENT, *MESSAGES):
    setattr(InterruptibleGroup, _name, _handed_on(_name))
