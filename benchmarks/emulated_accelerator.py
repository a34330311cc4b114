"""A workload whose ranks wait as if an accelerator computed: time per token, no use of the CPU.

On a machine with fewer cores than ranks the sum of all work is constant, so nobody's
share of it shows in the step time. Here every block computes a small real product and
then holds its rank with ``time.sleep``, which stands for the device, for a time
proportional to its tokens: a third in the forward, the rest in the backward. Sleep
changes no bit; everything around it (programs, reduction, vote, apply, recovery) is
the real thing. Used by benchmarks/masked_step.py:

    workload:
      entrypoint: benchmarks/emulated_accelerator.py:workload
      config: {deviceMillisecondsPerToken: 2.0}
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mainstay_train.exact import draws, optimizer
from mainstay_train.model import blocks, data, losses, split
from mainstay_train.model import workload as workloads

FORWARD_SHARE = 1 / 3
"""Of a block's device time: a backward is two products for the forward's one."""


class RandomTokens:
    """[1, sequence] tokens drawn by address: costs next to nothing and reads no file."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence

    def batch(self, address: draws.Address) -> data.Batch:
        """One sample and, as targets, the tokens that follow each."""
        generator = address.generator("tokens")
        row = torch.randint(0, data.VOCAB_SIZE, (1, self.sequence + 1), generator=generator)
        return data.Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous())

    def fingerprint(self) -> str:
        """Shape of a micro-batch; the values follow from the address."""
        return f"random tokens, {self.sequence}, version 1"


@dataclass(frozen=True, slots=True)
class Device:
    """The settings of the emulated device."""

    forward_s: float
    """Per block and micro-batch."""
    backward_s: float
    weight_s: float
    """In the gradients of weights, once that of the input is there."""


class HeldBlock(nn.Module):
    """A residual product of [1, sequence, width] that holds its rank as a device would."""

    def __init__(self, width: int, device: Device) -> None:
        super().__init__()
        self.device = device
        self.norm = split.RMSNorm(width)
        self.out = split.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, sequence, width] to the same shape."""
        held: torch.Tensor = _Hold.apply(x, self.out.weight, self.device)  # type: ignore[no-untyped-call]
        return x + self.out(self.norm(held))


class _Hold(torch.autograd.Function):
    """The identity, late in both directions."""

    @staticmethod
    def forward(ctx, x, weight, device):  # type: ignore[no-untyped-def]
        ctx.held = (weight, device, split.current())
        time.sleep(device.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        weight, device, recorder = ctx.held
        time.sleep(device.backward_s)
        if device.weight_s:
            # The weight's own gradient is deferred already: this comes behind it, and adds nothing.
            recorder.defer(weight, lambda _view, _add: time.sleep(device.weight_s))
        return dy, None, None


class Head(nn.Module):
    """Norm and projection to the vocabulary."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = split.RMSNorm(width)
        self.out = split.Linear(width, data.VOCAB_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, sequence, width] to logits [1, sequence, vocabulary]."""
        logits: torch.Tensor = self.out(self.norm(x))
        return logits


def workload(config: Mapping[str, Any], args: Sequence[str]) -> workloads.Workload:
    """The entrypoint.

    Config: ``deviceMillisecondsPerToken`` over all blocks, forward and backward;
    ``sequence``, ``width``, ``layers``; ``weightShare`` of the time is held in the gradients of
    weights, which a pipeline may compute later (0).
    """
    known = ["deviceMillisecondsPerToken", "sequence", "width", "layers", "weightShare"]
    workloads.refuse_unknown(config, known, "workload.config")
    assert not args, "this model takes no arguments"
    sequence, width = int(config.get("sequence", 64)), int(config.get("width", 64))
    layers = int(config.get("layers", 4))
    per_block_s = float(config["deviceMillisecondsPerToken"]) * 1e-3 * sequence / layers
    weight_share = float(config.get("weightShare", 0.0))
    shares = (FORWARD_SHARE, 1 - FORWARD_SHARE - weight_share, weight_share)
    device = Device(*(per_block_s * share for share in shares))
    spec = blocks.BlockSpec
    return workloads.Workload(
        blocks=(
            spec(name="embedding", build=lambda: split.Embedding(data.VOCAB_SIZE, width), cost=0.1),
            *(
                spec(name=f"held.{i}", build=partial(HeldBlock, width, device), cost=1.0)
                for i in range(layers)
            ),
            spec(name="head", build=lambda: Head(width), loss=losses.cross_entropy_sum, cost=0.1),
        ),
        dataset=RandomTokens(sequence),
        activation_shape=(1, sequence, width),
        learning_rate=optimizer.warmup_cosine(peak=1e-3, warmup_steps=10, total_steps=1000),
    )
