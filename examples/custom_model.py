"""A user's own model: a gated convolution mixer that learns to add, on its own data.

Not a Llama, not text files, mostly plain torch modules: what Mainstay needs is only
a list of blocks between which one tensor passes, a loss that is a sum over tokens,
and data that is a function of its address. Use it in a TrainingJob with

    workload:
      entrypoint: examples/custom_model.py:workload
      config: {width: 64, layers: 4}
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mainstay_train import blocks, data, draws, losses, optimizer, split
from mainstay_train import workload as workloads

LENGTH = 24
SAMPLES = 8


class Additions:
    """Lines such as "417+86=503", drawn by address; only the result counts in the loss."""

    def batch(self, address: draws.Address) -> data.Batch:
        generator = address.generator("additions")
        numbers = torch.randint(0, 1000, (SAMPLES, 2), generator=generator).tolist()
        rows = torch.zeros(SAMPLES, LENGTH + 1, dtype=torch.int64)
        targets = torch.full((SAMPLES, LENGTH), losses.IGNORED_TARGET)
        for i, (a, b) in enumerate(numbers):
            question = f"{a}+{b}="
            line = f"{question}{a + b}\n".encode()
            rows[i, : len(line)] = torch.tensor(list(line))
            targets[i, len(question) - 1 : len(line) - 1] = rows[i, len(question) : len(line)]
        return data.Batch(rows[:, :-1].contiguous(), targets)

    def fingerprint(self) -> str:
        return "additions below 1000, version 1"


class Mixer(nn.Module):
    """A causal depthwise convolution over time, then a gated product over channels."""

    def __init__(self, width: int, kernel: int = 8) -> None:
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, kernel, groups=width)
        self.gate = split.Linear(width, 2 * width)  # its weight gradient can wait for idle time
        self.out = nn.Linear(width, width)  # any module works

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.pad(self.norm(x).transpose(1, 2), (self.kernel - 1, 0))
        a, b = self.gate(self.mix(y).transpose(1, 2)).chunk(2, dim=-1)
        added: torch.Tensor = self.out(functional.silu(a) * b)
        return x + added


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, data.VOCAB_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.norm(x))
        return logits


def workload(config: Mapping[str, Any], args: Sequence[str]) -> workloads.Workload:
    """The entrypoint: `workload.config` and `workload.args` of the TrainingJob come in."""
    workloads.refuse_unknown(config, ["width", "layers"], "workload.config")
    assert not args, "this model takes no arguments"
    width, layers = int(config.get("width", 64)), int(config.get("layers", 4))
    spec = blocks.BlockSpec
    return workloads.Workload(
        blocks=(
            spec(name="embedding", build=lambda: nn.Embedding(data.VOCAB_SIZE, width), cost=1.0),
            *(spec(name=f"mixers.{i}", build=partial(Mixer, width)) for i in range(layers)),
            spec(name="head", build=lambda: Head(width), loss=losses.cross_entropy_sum),
        ),
        dataset=Additions(),
        activation_shape=(SAMPLES, LENGTH, width),
        learning_rate=optimizer.warmup_cosine(peak=3e-3, warmup_steps=10, total_steps=500),
    )
