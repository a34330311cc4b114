"""Executes sums twice as a whole: those of a reduction, and the digests that a vote tells.

An owner's sum is executed again when the first result is on its way to others. Digests are made
twice in a row, and compared when both are on the host, where they are read anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.verdicts import Remedy, Verdict, judge
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.telling import Telling
from mainstay_train.kernels import bits
from mainstay_train.kernels.twins import Overwritten
from mainstay_train.sums.readout import Later, Readout

SUM = "sum"
"""Stands in findings for a kernel: all that adds up an owner's share of a bucket."""

DIGESTS = "digests"
"""Stands in findings for a kernel: all that makes the digests of a vote."""

RAISED = "raised"
"""In place of a digest of what an execution has made."""

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


class Digesting(Telling, Protocol):
    """Checks of a trainer, as they say how digests are made."""

    step: int

    @property
    def compares(self) -> bool:
        """Whether all kernels are executed twice."""

    def over_whole(self, phase: Phase) -> Repeating:
        """Return the scope of what is executed again as a whole."""


class Digests:
    """Digests of a vote, made twice where checks are on.

    Args:
        checks: hear of what is found.
        make: makes them, int64 tensors.
        readout: fetches them.

    Raises:
        Exception: what both executions have raised, or the only one.
    """

    def __init__(
        self, checks: Digesting, make: Callable[[], list[torch.Tensor]], readout: Readout
    ) -> None:
        self._checks, self._make = checks, make
        self._once, self._scope = Once(), checks.over_whole(Phase.VOTE)
        errors: list[Exception] = []
        self._made: list[list[Later] | None] = []
        """By execution; None of one that has raised, as a wrong index does."""
        executions = (Execution.PRIMARY, Execution.CHECKER)[: 2 if checks.compares else 1]
        for execution in executions:
            try:
                self._made.append(readout.add_all(self._execute(execution)))
            except (IndexError, RuntimeError, ValueError) as error:
                self._made.append(None)
                errors.append(error)
        if len(errors) == len(executions):
            raise errors[0]

    def _execute(self, execution: Execution | None) -> list[torch.Tensor]:
        with self._scope, self._scope.once(self._once, execution):
            return self._make()

    def read(self) -> list[torch.Tensor]:
        """Return them, once they are fetched.

        Raises:
            UnreliableDeviceError: three executions had three results.
        """
        fetched = [[one() for one in made or ()] for made in self._made]
        told = [
            RAISED if made is None else bits.digest_of(tensors)
            for made, tensors in zip(self._made, fetched, strict=True)
        ]
        if len(set(told)) == 1:
            return fetched[0]
        judgement = judge(told[0], told[1], bits.digest_of(self._execute(None)), used=False)
        self._checks.tell(
            self._once.place or Place(self._checks.step, Phase.VOTE),
            ordinal=self._once.start,
            operator=DIGESTS,
            output=0,
            num_elements=0,
            judgement=judgement,
        )
        return fetched[1] if judgement.verdict is Verdict.PRIMARY_HIT else fetched[0]
