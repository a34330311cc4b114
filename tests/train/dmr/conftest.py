"""Fixtures of the tests of planned checks: those of the tests of checks."""

from __future__ import annotations

from tests.train.checks.conftest import flipped

__all__ = ["flipped"]
