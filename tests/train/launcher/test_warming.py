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

NO_DRIVER = """
from mainstay_train.launcher import warming

def refuse(*_, **__):
    raise AssertionError("the driver was asked")

warming.warm_up([])
import torch
torch.cuda.is_available = torch.cuda.device_count = refuse
torch.accelerator.current_accelerator = torch.accelerator.current_stream = refuse
warming.warm_up(["mainstay_train.launcher.main", "mainstay_train.models.llama"])
import os
print(os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"])
"""


def test_a_warm_parent_does_not_start_a_devices_driver() -> None:
    """Where it has, its children are refused by the driver: no trainer could use a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n", "what a user's module asks goes by NVML"


def test_the_first_backward_imports_nothing() -> None:
    """Each trainer, and each that comes in the place of a lost one, would import it again."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
