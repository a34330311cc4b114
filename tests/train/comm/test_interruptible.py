"""Collectives of an inner mesh whose tensors gloo cannot reach."""

from types import SimpleNamespace
from typing import Any

import torch

from mainstay_train.comm.interruptible import InterruptibleGroup


def test_a_collective_is_not_complete_before_the_callers_tensor_has_its_result() -> None:
    def fill(tensors: list[torch.Tensor]) -> Any:
        tensors[0].fill_(3.0)
        return SimpleNamespace(is_completed=lambda: True)

    # Each tensor is copied, as a device's is.
    of: Any = SimpleNamespace(rank=0, size=1, ended=None, staged=torch.clone)
    of.finish_collective = lambda *_, **__: None
    whole: Any = SimpleNamespace(allreduce=fill)
    tensor = torch.ones(1)
    work: Any = InterruptibleGroup(whole, of).allreduce([tensor])

    assert tensor.tolist() == [1.0]
    assert not work.is_completed()
    assert work.is_over, "a wait would not block"
    work.wait()
    assert tensor.tolist() == [3.0]
    assert work.is_completed()
