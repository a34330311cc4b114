"""The checks of a trainer, as whoever judges an execution tells them of it."""

from __future__ import annotations

from typing import Protocol

from mainstay_core.dmr.verdicts import Judgement
from mainstay_train.checks.places import Place


class Telling(Protocol):
    """Checks of a trainer that are told of executions which differed."""

    def tell(
        self,
        place: Place,
        *,
        ordinal: int,
        operator: str,
        output: int,
        num_elements: int,
        judgement: Judgement,
    ) -> None:
        """Tell what two executions that differed came to."""
