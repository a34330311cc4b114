"""Optimizers of torch without the decorators that import torch's compiler, and without a driver.

These decorators say that the compiler is to leave some methods alone. What calls them here is never
compiled, and the import takes a trainer seconds. The kernels, and so the bits, are the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


class _EagerGroups(torch.optim.Optimizer):
    """An optimizer that adds its groups without importing the compiler."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    def _accelerator_graph_capture_health_check(self) -> None:
        """Ask no device whether a graph is being captured: none ever is.

        A warm parent takes a step on the CPU. Were the driver asked there, none of its children
        could use a device.
        """

    _cuda_graph_capture_health_check = _accelerator_graph_capture_health_check


class EagerAdamW(_EagerGroups, torch.optim.AdamW):
    """torch's AdamW, which imports no compiler."""

    def step(self, closure: Any = None) -> Any:
        """Take one step, as torch does; no gradient is recorded."""
        with torch.no_grad():
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


class EagerSGD(_EagerGroups, torch.optim.SGD):
    """torch's stochastic gradient descent, which imports no compiler."""

    def step(self, closure: Any = None) -> Any:
        """Take one step, as torch does; no gradient is recorded."""
        with torch.no_grad():
            return inspect.unwrap(torch.optim.SGD.step)(self, closure)
