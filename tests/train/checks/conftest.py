"""Fixtures of the tests of checks."""

from __future__ import annotations

import pytest
import torch

from mainstay_train.kernels import bits


@pytest.fixture
def flipped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each flip found a bit; high bits of a count would ask for too much memory."""
    flip_bit, found = bits.flip_bit, []

    def flip(tensor: torch.Tensor, element: int, bit: int) -> bool:
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        found.append(flip_bit(tensor, element, bit % 3 if is_whole else bit))
        return found[-1]

    monkeypatch.setattr(bits, "flip_bit", flip)
    return found
