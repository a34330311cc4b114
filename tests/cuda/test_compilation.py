"""Blocks as compiled code of a GPU: their bits repeat, or the job is refused by name."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from tests.train.checks.step import LLAMA, NARROW, SMALL

from mainstay_train.model import compilation, trial, workload

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton"),
    pytest.mark.skipif(
        shutil.which("gcc") is None and shutil.which("cc") is None,
        reason="Triton needs a C compiler",
    ),
]


@pytest.mark.parametrize("config", [SMALL, SMALL | NARROW], ids=["fp32", "bf16"])
def test_compiled_blocks_repeat_their_bits(needs_cuda, config):
    model = workload.load(LLAMA, {**config, "layers": 1})
    assert trial.check(model, needs_cuda) == {"compile": compilation.describe(needs_cuda)}


def test_compiled_blocks_are_near_those_that_are_not(needs_cuda):
    model = workload.load(LLAMA, {**SMALL, "layers": 1})
    x = trial.activation(model, needs_cuda)
    found = []
    for compiles in (False, True):
        (block,) = model.build([1], needs_cuda, compiles=compiles)
        block.initialize(0)
        found.append(trial.run_once(block, x, None))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)
