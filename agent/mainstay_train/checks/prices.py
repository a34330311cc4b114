"""Says which kernels are executed twice though recomputes check them: where that costs less."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mainstay_core.dmr.schedule import COMPILED_IMPRINT, is_pointwise_cheaper
from mainstay_train.kernels import imprints
from mainstay_train.kernels.calls import Call

MAX_CHEAP = 4096
"""Answers that are kept by the sizes of what a kernel makes: sizes may differ in every step."""


class Prices:
    """Answers whether two executions of a kernel cost less than two times its imprints."""

    def __init__(self) -> None:
        self._cheap: dict[tuple[int, ...], bool] = {}
        """By whether it is far and by the bytes of what it makes."""

    def is_cheap(self, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a call is executed twice: only what computes element by element may be."""
        if not call.kernel.is_pointwise:
            return False
        sizes = call.is_far, *[tensor.nbytes for tensor in outputs]
        found = self._cheap.get(sizes)
        if found is None:
            # What both cost on a device was not measured: there only what many small tensors save.
            price = COMPILED_IMPRINT if call.is_far else imprints.price()
            if len(self._cheap) >= MAX_CHEAP:
                self._cheap.clear()  # of a step's sizes all are soon there again
            found = self._cheap[sizes] = is_pointwise_cheaper(sizes[1:], price)
        return found
