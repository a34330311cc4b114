"""First values of parameters, by address: seed and model-wide name.

Nothing else may enter, or a stage's parameters would depend on what the same
process initialised before it, that is on the number of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainstay_train.exact import draws

DEFAULT_STD = 0.02
"""Standard deviation of matrices, as in GPT-2 and Llama."""


@dataclass(frozen=True, slots=True)
class Init:
    """A normal distribution; ``std`` 0 makes a constant of ``mean``."""

    std: float = DEFAULT_STD
    mean: float = 0.0


def init_tensor(
    seed: int, name: str, shape: Sequence[int], std: float, mean: float = 0.0
) -> torch.Tensor:
    """Draw the first value of the parameter ``name``.

    Args:
        seed: ``training.seed`` of the job.
        name: Model-wide name, e.g. "layers.3.attention.out.weight".
        shape: Its shape.
        std: Standard deviation; 0 makes a constant.
        mean: Mean.

    Returns:
        fp32 on CPU, whatever the device: draws must not differ between devices.
    """
    result = torch.empty(tuple(shape), dtype=torch.float32)
    if std == 0.0:
        return result.fill_(mean)
    return result.normal_(mean, std, generator=draws.generator_of(seed, "init", name))


def default_init(name: str, shape: Sequence[int]) -> Init:
    """The rule for a block that brings none.

    Scales of norms (one-dimensional, named ``weight``) start at 1, other
    one-dimensional parameters at 0, matrices with a standard deviation of 0.02.
    """
    if len(shape) > 1:
        return Init()
    return Init(std=0.0, mean=1.0 if name.endswith("weight") else 0.0)
