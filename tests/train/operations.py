"""Counts what code asks of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mainstay_train.sums import digests, rows


class Operations(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[str]:
    """The name of a device whose tensors have no elements: it does for counting.

    Tables are made anew, before and after: tests play an accelerator of the same name.
    """
    tables = (digests._tables, rows._positions)
    for table in tables:
        table.cache_clear()
    try:
        yield "meta"
    finally:
        for table in tables:
            table.cache_clear()
