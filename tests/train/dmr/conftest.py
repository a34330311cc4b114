"""Fixtures of the tests of planned checks: those of the tests of checks."""

from __future__ import annotations

import pytest
from tests.train.checks.conftest import flipped

from mainstay_core.dmr import schedule
from mainstay_train.kernels import imprints

__all__ = ["flipped", "prices"]


@pytest.fixture(autouse=True)
def prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of small models are over at once: here waiting and imprints cost nothing."""
    monkeypatch.setattr(schedule, "WAIT_S", 0.0)
    free = schedule.ImprintPrice(start_s=0.0, s_per_byte=0.0)
    monkeypatch.setattr(imprints, "price", lambda: free)
