"""A device that computes one kernel wrongly, once, whoever calls it: no scope has to list it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mainstay_train.kernels import bits
from mainstay_train.kernels.dispatch import name_of


class WrongOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts one bit into what a kernel of some name has returned or written.

    It lies below checks: they see what it returns as what a kernel has made.

    Args:
        kernel: its name, e.g. ``aten.copy_``.
        dtype: of what it makes.
    """

    def __init__(self, kernel: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernel, self._dtype = kernel, dtype
        self.was_wrong = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if name_of(func) != self._kernel or self.was_wrong:
            return result
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        made = [each for each in made or args[:1] if each.dtype is self._dtype and each.numel() > 5]
        if made:
            bits.flip_bit(made[0], 5, 13)
            self.was_wrong = True
        return result
