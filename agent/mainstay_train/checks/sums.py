"""Executes the sums of a reduction twice: again when the first result is on its way to others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Remedy, judge
from mainstay_train.checks import bits
from mainstay_train.checks.places import Place
from mainstay_train.checks.telling import Telling
from mainstay_train.checks.twins import Overwritten

SUM = "sum"
"""Stands in findings for a kernel: all that adds up an owner's share of a bucket."""

Make = Callable[[torch.Tensor], None]
"""Writes a result into a tensor, whatever that held."""


@dataclass(slots=True)
class Once:
    """Kernels that are executed again together, and not one by one."""

    place: Place | None = None
    start: int = 0
    """The number of the first one in its place."""
    flips: dict[int, list[Flip]] = field(default_factory=dict)
    """By the kernel's number."""


class Repeating(Protocol):
    """A scope in which kernels can be executed again together."""

    def __enter__(self) -> object:
        """Begin, or go on."""

    def __exit__(self, *error: Any) -> None:
        """End, or pause."""

    def once(self, once: Once, execution: Execution | None) -> AbstractContextManager[None]:
        """Have each kernel executed once meanwhile.

        Args:
            once: describes them; written in the primary execution, and read in others.
            execution: which one it is; None: the third.
        """


class Summing(Telling, Protocol):
    """Checks of a trainer, as they hear of wrong sums."""

    wrong_sum: str


def sum_now(
    checks: Summing, scope: Repeating, into: torch.Tensor, make: Make
) -> Callable[[], None]:
    """Write a sum, and return what writes it a second time elsewhere and compares.

    Args:
        checks: hear of what is found.
        scope: which is entered now. The second execution enters it by itself.
        into: the sum goes there, and stays there until the second execution.
        make: adds it up.
    """
    once = Once()
    with scope.once(once, Execution.PRIMARY):
        make(into)

    def again(execution: Execution | None) -> torch.Tensor:
        # Memory of the same alignment, by which kernels choose their path.
        (twin,) = Overwritten([(into, True)], replaces=True).copy().written
        with scope, scope.once(once, execution):
            make(twin)
        return twin

    def check() -> None:
        found = again(Execution.CHECKER)
        if bits.are_equal(into, found):
            return
        executions = (into, found, again(None))
        judgement = judge(*(bits.digest_of([tensor]) for tensor in executions), used=True)
        if judgement.remedy is Remedy.VOID_TYPE:
            # The types are right: others have got a wrong sum of them.
            judgement = replace(judgement, remedy=Remedy.REDUCE_AGAIN)
            checks.wrong_sum = "this rank has added up partials wrongly"
        assert once.place is not None
        checks.tell(
            once.place,
            ordinal=once.start,
            operator=SUM,
            output=0,
            num_elements=bits.count_differing(into, found),
            judgement=judgement,
        )

    return check
