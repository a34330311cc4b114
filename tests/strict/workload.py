"""The small LLaMA, trained over the strict backend: an entry point of local jobs.

A bucket is one chunk, so that a small model has several, and reductions begin while it is computed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.strict.group import Strict

from mainstay_train.comm import group
from mainstay_train.exact import reduction
from mainstay_train.exact.layout import StageLayout
from mainstay_train.models.llama import workload

__all__ = ["workload"]

group.BACKENDS["gloo"] = Strict()

_build = reduction.Reducer.__init__


def _by_chunks(
    reducer: reduction.Reducer,
    layout: StageLayout,
    device: torch.device | str = "cpu",
    bucket_bytes: int = 0,
) -> None:
    del bucket_bytes
    _build(reducer, layout, device, 1)


reduction.Reducer.__init__ = _by_chunks  # type: ignore[method-assign]
