"""What core knows of the built-in model's size is what the model has."""

import pytest
import torch

from mainstay_core.job import model_sizes
from mainstay_train.exact.optimizer import adamw
from mainstay_train.model import workload

SMALL = {"dim": 16, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 32, "vocab": 300}


EXPERTS = {"experts": 5, "activeExperts": 3, "expertHidden": 24}
CASES = [
    *((model_sizes.LLAMA, c) for c in ({}, SMALL, {**SMALL, "sequence": 4096, "layers": 7})),
    *(
        (model_sizes.MOE, c)
        for c in (
            {},
            SMALL,
            {**SMALL, **EXPERTS},
            {**SMALL, **EXPERTS, "denseLayers": 0, "sharedExperts": 0, "biasRate": 0},
            {**SMALL, **EXPERTS, "denseLayers": 2, "sharedExperts": 2, "layers": 7},
        )
    ),
]


@pytest.mark.parametrize(("entrypoint", "config"), CASES)
def test_sizes_and_costs_are_those_of_the_model(entrypoint, config):
    model = workload.load(entrypoint, config)
    known = model_sizes.blocks_of(entrypoint, config)
    real = [sum(p.numel for p in flat.params) for flat in model.layouts()]
    assert [block.split + block.copied for block in known] == real
    assert [block.cost for block in known] == [spec.cost for spec in model.blocks]
    for stages in range(1, len(real) + 1):
        largest = max(sum(real[i] for i in cut) for cut in model.stages(stages))
        assert model_sizes.largest_state(known, stages, 1) == 12 * largest


def test_the_state_of_a_parameter_is_what_the_optimizer_keeps():
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = adamw()([("p", parameter)])
    parameter.grad = torch.ones(1000)
    optimizer.step()
    kept = [t for t in optimizer.state[parameter].values() if t.numel() > 1]
    assert 4 * (1 + len(kept)) == model_sizes.STATE_BYTES
