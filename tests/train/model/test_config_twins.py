"""What trainers refuse of a built-in model's configuration is refused before they are started."""

from __future__ import annotations

from typing import Any

import pytest

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.job.model_sizes import LLAMA, MOE
from mainstay_core.job.sizes.built_in_sizes import built_in_sizes
from mainstay_core.job.sizes.llama_sizes import KEYS as LLAMA_KEYS
from mainstay_core.job.sizes.moe_sizes import KEYS as MOE_KEYS
from mainstay_train.models.llama_config import LlamaConfig, parse_config
from mainstay_train.models.moe_config import MoeConfig

SMALL: dict[str, Any] = {"dim": 16, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 32}
VALUES = (
    None, -1, 0, 1, 2, 3, 4, 7, 300, 0.5, 1.0, -0.5, 1_000_000, True, "2", "", "none", "plain",
    "softmax", "probabilities", "flash", "bfloat16", "float16", [], ["flash"], {}, {"path": "x"},
    {"path": 3}, {"paths": "x"},
)  # fmt: skip
KINDS = {LLAMA: (LLAMA_KEYS, LlamaConfig), MOE: (MOE_KEYS, MoeConfig)}


@pytest.mark.parametrize("entrypoint", [LLAMA, MOE])
def test_core_and_trainers_refuse_the_same_configurations(entrypoint: str) -> None:
    keys, kind = KINDS[entrypoint]
    differing = []
    for key in [*sorted(keys), "layer"]:
        for value in VALUES:
            for beside in ({}, {"activeExperts": 1, "gates": "plain"} if entrypoint == MOE else {}):
                config = SMALL | beside | {key: value}
                before = _is_refused(
                    lambda config=config: built_in_sizes(
                        entrypoint, config, 1, 0, accumulates=False
                    )
                )
                by_trainers = _is_refused(lambda config=config: parse_config(config, kind))
                if before != by_trainers and not _is_too_large(key, value):
                    differing.append((config, before, by_trainers))
    assert differing == []


def _is_too_large(key: str, value: Any) -> bool:
    """Core alone bounds the layers: it makes a list of them."""
    return key == "layers" and value == 1_000_000


def _is_refused(attempt: Any) -> bool:
    try:
        attempt()
    except InvalidSpecError:
        return True
    return False
