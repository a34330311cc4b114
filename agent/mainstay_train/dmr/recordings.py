"""Records one passage of a trainer's program, and how long the program waits, for its planner."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_core.dmr.coverage import UncoveredError
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import RefusedPlanError
from mainstay_core.planning.program import Op
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.planned import Spot, Window
from mainstay_train.dmr.recorder import Passage, PassageRecord
from mainstay_train.dmr.timers import Clock, timer_of

logger = logging.getLogger(__name__)


@contextmanager
def refused_if_it_fails(what: str) -> Iterator[None]:
    """Have what is raised by mistake meanwhile, where no code of a user runs, cost time alone."""
    try:
        yield
    except (UncoveredError, RefusedPlanError, InvalidSpecError):
        raise
    except Exception as error:
        logger.exception("it has failed %s", what)
        raise RefusedPlanError(f"it has failed {what}: {brief(error)}") from error


@dataclass(slots=True)
class ProgramWaits:
    """The waits of one program, for all of its micro-batches."""

    lengths: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, by the names that windows of plans have."""
    has_passed: bool = False
    """Whether some micro-batch's passage is over: before that no wait is behind one."""

    def note(self, window: Window, wait_s: float) -> None:
        """Note the length of a wait."""
        names = {window.name} - {Op.RECV_F.value}  # that one comes before a passage
        if self.has_passed:
            names.update(window.behind)
        for name in sorted(names):
            self.lengths.setdefault(name, []).append(wait_s)


class Recording:
    """The recording of one passage.

    Args:
        first_block: of the stage, by its number in the model.
        device: where it computes.
        clock: returns seconds that only grow.
    """

    def __init__(self, first_block: int, device: torch.device, clock: Clock) -> None:
        self.record = PassageRecord(timer_of(device, clock))
        self.passage = Passage()
        self.spots: dict[Spot, str] = {}
        """Names of operators."""
        self.problem = ""
        """Why the passage cannot be described; empty: it can."""
        self._first_block = first_block

    def finish(self) -> None:
        """Take the passage for complete."""
        self.passage = self.record.finish()

    def receive(self, window: Window, tensor: torch.Tensor) -> None:
        """See what has come from another stage."""
        self.record.receive(window, tensor)

    def __enter__(self) -> object:
        self.record.host_reads.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.record.host_reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def enter(self, place: Place) -> None:
        """Say which pass comes next."""
        if place.block is None or place.in_pass is Pass.STEP:
            self.record.leave()
            return
        again = place.phase is Phase.BACKWARD and place.in_pass is Pass.FORWARD
        number = self._first_block + place.block
        self.record.enter(number, place.name or "", place.in_pass, again=again)

    def begin(self) -> None:
        """A call begins."""
        self.record.begin()

    def end(self) -> None:
        """It was given to the device."""
        self.record.end()

    def exchange(self, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """See what inner ranks have computed together, and what this one has given for it."""
        self.record.exchange(given, result)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any, spot: Spot | None) -> None:
        """See a call that has been made."""
        if self.problem:
            return
        try:
            with refused_if_it_fails("to record a kernel"):
                name = self.record.see(func, args, kwargs, result)
        except (InvalidSpecError, RefusedPlanError) as error:
            self.problem = brief(error)  # the step goes on: it is checked at once
            return
        if name is not None and spot is not None:
            self.spots[spot] = name
