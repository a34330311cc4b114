"""Reads the demo's job, whose model several benchmarks train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_SPEC: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "examples" / "demo.yaml").read_text()
)["spec"]
LANES: int = _SPEC["training"]["lanes"]
STAGES: int = _SPEC["parallelism"]["stages"]
WORKLOAD: dict[str, Any] = _SPEC["workload"]
MODEL: dict[str, Any] = WORKLOAD["config"]
"""Configuration of the demo's Llama: 3.2 million parameters."""
