"""A user's workload for tests: a built-in Llama whose blocks refuse numbers that are too large."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mainstay_train.model.workload import Workload
from mainstay_train.models import llama

MOST = 1e4
SAID = "what this block is given is too large"


def _refuse(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    x = given[0]
    if x.is_floating_point() and not bool((x.detach().abs() < MOST).all()):
        raise AssertionError(SAID)


def _watched(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        module = build()
        module.register_forward_pre_hook(_refuse)
        return module

    return built


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    """Return the Llama; each block looks at its input."""
    built_in = llama.workload(config)
    blocks = [dataclasses.replace(spec, build=_watched(spec.build)) for spec in built_in.blocks]
    return dataclasses.replace(built_in, blocks=tuple(blocks))
