"""What a forked trainer finds imported already."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

FIRST_BACKWARD = """
import sys
from mainstay_train.launcher import warming
warming.warm_up(["mainstay_train.models.llama"])
import torch
before = set(sys.modules)
x = torch.ones(2, requires_grad=True)
torch.autograd.grad((x * x).sum(), x)
y = (x * x * x).sum()
y.backward()
print(sorted(set(sys.modules) - before))
"""


def test_the_first_backward_imports_nothing() -> None:
    """Each trainer, and each that comes in the place of a lost one, would import it again."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
