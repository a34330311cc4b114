"""Lists what is fuzzed. A target's module is imported when it is asked for: some need torch."""

from __future__ import annotations

import importlib

from tests.fuzz.runner import Target

NAMES = ("frames", "messages", "spec", "faults", "bodies", "manifests", "checkpoints")


def load(name: str) -> Target:
    """Return a target by its name."""
    made: Target = importlib.import_module(f"tests.fuzz.{name}").TARGET()
    assert made.name == name
    return made
