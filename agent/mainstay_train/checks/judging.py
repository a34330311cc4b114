"""Says what a scope of checks asks of the checks of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mainstay_core.dmr.schedule import Later
from mainstay_train.checks import late
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.places import Place
from mainstay_train.checks.replays import Replays
from mainstay_train.kernels.calls import (
    Call,
)
from mainstay_train.kernels.dispatch import Effects


class Judging(late.Judged, Protocol):
    """Checks of a trainer, as they hear of what was found and say what waits."""

    replays: Replays
    await_cell: Callable[[], None]

    @property
    def spares_memory(self) -> bool:
        """Whether large results of two executions are not kept at a time."""

    def is_cheap(self, place: Place, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a call is executed twice at once, though recomputes check its block."""

    def flags_at(self, place: Place) -> Flags | None:
        """Return where comparisons of kernels at a place are left; None: the host looks at once."""

    def later(self, place: Place, call: Call, effects: Effects) -> Later | None:
        """Return until when the check of a call waits; None: it does not."""
