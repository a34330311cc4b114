"""The small LLaMA, trained over the strict backend: an entry point of local jobs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.strict.group import Strict

from mainstay_train.comm import group
from mainstay_train.models.llama import workload

__all__ = ["workload"]

group.BACKENDS["gloo"] = Strict()
