"""A user's workload for tests: a built-in Llama whose layers give outputs that are not packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mainstay_train.model.workload import Workload
from mainstay_train.models import llama


def _transpose(module: nn.Module, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """Return the output as it was, with its last dimension lying one row apart in memory."""
    del module, given
    return output.transpose(-1, -2).contiguous().transpose(-1, -2)


def _transposed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        module = build()
        module.register_forward_hook(_transpose)
        return module

    return built


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    """Return the Llama; what follows its layers gets a copy of their outputs."""
    built_in = llama.workload(config)
    first, *layers, last = built_in.blocks
    odd = [dataclasses.replace(spec, build=_transposed(spec.build)) for spec in layers]
    return dataclasses.replace(built_in, blocks=(first, *odd, last))
