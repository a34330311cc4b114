"""Executes what inner ranks compute together a second time, all of them alike.

A rank cannot repeat a sum over its cell alone. So each one is executed twice on all ranks, at once;
then they tell each other whether somebody's two results differ, and if so execute it a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.profiles import WindowKind
from mainstay_core.dmr.verdicts import Judgement, Remedy, judge
from mainstay_train.checks.places import Place
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.comm import mesh
from mainstay_train.comm.interruptible import newest_of
from mainstay_train.kernels import bits

REPEATED = frozenset(
    {
        "_c10d_functional.all_gather_into_tensor",
        "_c10d_functional.all_reduce",
        "_c10d_functional.all_to_all_single",
        "_c10d_functional.reduce_scatter_tensor",
    }
)
"""Collectives that write to no operand."""
SHARED = frozenset({"_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_reduce"})
"""Those of them of which all ranks get the same."""
SILENT = frozenset({"_c10d_functional._wrap_tensor_autograd", "_c10d_functional.wait_tensor"})
"""Functions among them that send nothing."""
GROUP = "group_name"


class Tell(Protocol):
    """Tells what executions that differed came to, as :meth:`Checks.tell` does of a place."""

    def __call__(self, *, output: int, num_elements: int, judgement: Judgement) -> None:
        """Tell it.

        Raises:
            MainstayError: the device cannot be relied on.
        """


Wait = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the result of a group's newest collective once it is there."""


class Hears(Protocol):
    """Hears of the collectives of a cell while one shard type is computed."""

    shard_type: int

    def exchanged(
        self, place: Place, given: Sequence[torch.Tensor], made: torch.Tensor, *, is_shared: bool
    ) -> None:
        """Hear what this rank has given, and what counts of what it has got: all the same?"""

    def missed(self) -> None:
        """Hear that there was a collective of which nothing can be told."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of :data:`REPEATED`."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    wait: Wait
    """Waits for a result."""
    check_group: Callable[[], None] = mesh.check
    """Raises if results may be anything, as their group has ended."""

    def run(self, flips: Sequence[Flip]) -> torch.Tensor:
        """Execute it once; wait for it only where flips are put in."""
        result: torch.Tensor = self.func(*self.args, **self.kwargs)
        if flips:
            _put(flips, Execution.PRIMARY, self.waited(result))
        return result

    def check(self, flips: Sequence[Flip], tell: Tell) -> torch.Tensor:
        """Execute it twice, and a third time if the two differ on some rank; return what is right.

        Raises:
            MainstayError: three executions had three results here.
            RuntimeError: two had, and their group has ended: that says nothing of this device.
        """
        primary = self._execute(flips, Execution.PRIMARY)
        checker = self._execute(flips, Execution.CHECKER)
        differs = not bits.are_equal(primary, checker)
        if not self._do_some(differs, primary.device):
            return primary
        third = self._execute([flip for flip in flips if flip.sticky], Execution.BOTH)
        if not differs:
            return primary
        results = (primary, checker, third)
        judgement = judge(*(bits.digest_of([result]) for result in results), used=False)
        num_elements = bits.count_differing(primary, checker)
        self.check_group()  # now that all was read: what is aborted is noted first, and then ends
        tell(output=0, num_elements=num_elements, judgement=judgement)
        return checker if judgement.remedy is Remedy.REPAIR else primary

    def waited(self, result: torch.Tensor) -> torch.Tensor:
        """Return the result of its group's newest collective once it is there."""
        return self.wait(result, self._group)

    def _execute(self, flips: Sequence[Flip], execution: Execution) -> torch.Tensor:
        result = self.waited(self.func(*self.args, **self.kwargs))
        _put(flips, execution, result)
        return result

    def _do_some(self, differs: bool, device: torch.device) -> bool:
        """Return whether the results differ on some rank of the group."""
        flag = torch.tensor([int(differs)], device=device)
        largest = torch.ops._c10d_functional.all_reduce(flag, "max", self._group)
        return bool(self.waited(largest).item())

    @property
    def _group(self) -> Any:
        """The name of the group over which it communicates."""
        names = [argument.name for argument in self.func._schema.arguments]
        place = names.index(GROUP)
        return self.args[place] if place < len(self.args) else self.kwargs[GROUP]


def use_wait(group: str, waiting: WaitingChecks, begin: Callable[[], None]) -> None:
    """Execute checks while a group's newest collective is under way.

    Only such as are of this rank alone wait. So the others need not know which, and when.

    Args:
        group: by the name that torch has for it.
        waiting: the checks.
        begin: called before.
    """
    begin()
    work = newest_of(group) if waiting else None
    if work is not None:
        with _disable_current_modes():  # the caller is in a scope of checks
            waiting.use(lambda: not work.is_over, kind=WindowKind.INTRA)


def waited(result: torch.Tensor) -> torch.Tensor:
    """Return the result of a collective once it is there."""
    there: torch.Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return there


def _put(flips: Sequence[Flip], execution: Execution, result: torch.Tensor) -> None:
    for flip in flips:
        if flip.execution in (execution, Execution.BOTH):
            bits.flip_bit(result, flip.element, flip.bit)
