"""A user's workload for tests: the small LLaMA with a block that gives other bits each time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mainstay_train.model import split
from mainstay_train.model.blocks import BlockSpec
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama


class Noise(split.SplitModule):
    """Scales by a weight, and adds what the host draws: no function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return other bits each time."""
        return x * self.weight + os.urandom(1)[0] / 256


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    """Return the small LLaMA with noise behind its embedding."""
    del args
    built_in = llama.workload(dict(config))
    first, *others = built_in.blocks
    noise = BlockSpec(name="noise", build=Noise)
    return dataclasses.replace(built_in, blocks=(first, noise, *others))
