"""Values as canonical terms: what a number was made of, instead of the number.

The bits of a state or gradient are the hash of everything that went into them.
A type counted twice or left out, an activation of another step, a contribution
computed from stale parameters: each yields another term than the failure-free
run, for certain.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache


@lru_cache(maxsize=1 << 17)
def term(*parts: object) -> str:
    """Return the name of the value made of ``parts``: 32 hex digits, like a digest."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def initial_state(stage: int) -> str:
    """A stage's state at version 0."""
    return term("initial", stage)


def sample(step: int, shard_type: int, micro_batch: int) -> str:
    """What the data set says at an address."""
    return term("sample", step, shard_type, micro_batch)


def forward(stage: int, received: str, params: str) -> str:
    """A stage's output."""
    return term("forward", stage, received, params)


def backward(stage: int, received: str, gradient: str, params: str) -> str:
    """Gradient with respect to a stage's input; the last stage's ``gradient`` is empty."""
    return term("backward", stage, received, gradient, params)


def weight_gradient(flows: tuple[tuple[str, str, str], ...]) -> str:
    """A type's gradient of one stage, from (input, output gradient, params) by micro-batch."""
    return term("weights", flows)


def reduced(values: tuple[str, ...]) -> str:
    """The canonical sum over all types, in order."""
    return term("sum", values)


def applied(params: str, gradient: str) -> str:
    """A stage's state after one more step."""
    return term("applied", params, gradient)


@lru_cache(maxsize=4096)
def true_states(num_types: int, micro_batches: int, stages: int, version: int) -> tuple[str, ...]:
    """States of all stages at ``version`` in a run without failures."""
    if version == 0:
        return tuple(initial_state(stage) for stage in range(stages))
    params = true_states(num_types, micro_batches, stages, version - 1)
    step = version - 1
    gradients: list[list[str]] = [[] for _ in range(stages)]
    for shard_type in range(num_types):
        flows: list[list[tuple[str, str, str]]] = [[] for _ in range(stages)]
        for micro_batch in range(micro_batches):
            inputs = [sample(step, shard_type, micro_batch)]
            for stage in range(stages):
                inputs.append(forward(stage, inputs[stage], params[stage]))
            gradient = ""
            for stage in reversed(range(stages)):
                flows[stage].append((inputs[stage], gradient, params[stage]))
                gradient = backward(stage, inputs[stage], gradient, params[stage])
        for stage in range(stages):
            gradients[stage].append(weight_gradient(tuple(flows[stage])))
    return tuple(
        applied(params[stage], reduced(tuple(gradients[stage]))) for stage in range(stages)
    )
