"""Values as canonical terms: what a number was made of, instead of the number.

The bits of a state or gradient are the hash of everything that went into them.
A type counted twice or left out, an activation of another step, a contribution
computed from stale parameters: each yields another term than the failure-free
run, for certain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

from mainstay_core.base.shape import Order
from mainstay_core.planning.routes import Extent, Route, route_of
from mainstay_core.rank.votes import clip

CLIP_NORM = 0.01
"""Bound on the norm of a step's gradient: every step is clipped, so that the norm counts."""
TOKENS = 4
"""Of each shard type."""


@lru_cache(maxsize=1 << 17)
def term(*parts: object) -> str:
    """Return the name of the value made of ``parts``: 32 hex digits, like a digest."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def initial_state(position: int) -> str:
    """A position's state at version 0."""
    return term("initial", position)


def sample(step: int, shard_type: int, micro_batch: int) -> str:
    """What the data set says at an address."""
    return term("sample", step, shard_type, micro_batch)


def forward(position: int, received: str, params: str, extent: Extent = Extent.WHOLE) -> str:
    """A position's part of the output of its stage, or of a part of it."""
    return term("forward", position, extent.value, received, params)


def backward(
    position: int, received: str, gradient: str, params: str, extent: Extent = Extent.WHOLE
) -> str:
    """A position's part of the gradient of its input; ``gradient`` is empty at the end."""
    return term("backward", position, extent.value, received, gradient, params)


def mixed(parts: tuple[str, ...]) -> str:
    """What the inner ranks of a stage make of their parts together."""
    return parts[0] if len(parts) == 1 else term("mixed", parts)


def counted(stage: int, step: int, shard_type: int) -> tuple[int, ...]:
    """What the blocks of a stage count in a type: itself, and a number of its address."""
    return 1, stage + step + shard_type


Passed = tuple[str, str, str, Extent]
"""What a micro-batch leaves where it passed: input, output gradient, params, part of the stage."""


def weight_gradient(flows: tuple[Passed, ...]) -> str:
    """A type's gradient of one position, from its micro-batches in order."""
    return term("weights", tuple((*flow[:3], flow[3].value) for flow in flows))


def reduced(values: tuple[str, ...]) -> str:
    """The canonical sum over all types, in order."""
    return term("sum", values)


def applied(params: str, gradient: str, scale: float) -> str:
    """A position's state after one more step."""
    return term("applied", params, gradient, scale)


def norms_sq(stage: int, inner: int) -> tuple[float, ...]:
    """The squared norms of a position's blocks, in any step."""
    return 2.0 + stage, 1.0 + inner


@lru_cache
def scale_of(num_types: int, stages: int, width: int) -> float:
    """The factor from a step's summed to its applied gradient, which is of all stages."""
    told = [
        norm_sq
        for stage in range(stages)
        for block in zip(*(norms_sq(stage, inner) for inner in range(width)), strict=True)
        for norm_sq in block
    ]
    return clip(told, TOKENS * num_types, CLIP_NORM)[1]


def gradient_digest(gradient: str | None) -> str:
    """The digest of a reduced gradient."""
    return term("gradient", gradient)


UnitTerm = tuple[int, str]
"""A unit's part of a state or gradient: which unit, and of what whole it is a part."""


def unit_of(unit: int, whole: str) -> UnitTerm:
    """A unit's part of a position's state or gradient."""
    return unit, whole


_STATE_OF: dict[str, str] = {}
"""By the term of compute weights the state of which they are."""


def compute_weights(state: UnitTerm) -> UnitTerm:
    """What a unit computes with. It is no state: nothing can be applied to it."""
    unit, whole = state
    weights = term("weights", whole)
    _STATE_OF[weights] = whole
    return unit, weights


def computed_with(copy: UnitTerm) -> UnitTerm:
    """The unit's state with which a copy computes alike: itself, or that of compute weights."""
    unit, whole = copy
    return unit, _STATE_OF.get(whole, whole)


def unit_applied(state: UnitTerm, gradient: UnitTerm, scale: float) -> UnitTerm:
    """A unit's state after one more step, by its part of the gradient."""
    unit, params = state
    if gradient[0] != unit:
        return unit, term("misapplied", state, gradient)
    return unit, applied(params, gradient[1], scale)


def whole_of(units: Sequence[UnitTerm]) -> str:
    """The state or gradient that all units are together: another one unless all are its parts."""
    wholes = {whole for _, whole in units}
    fits = [unit for unit, _ in units] == list(range(len(units)))
    return wholes.pop() if fits and len(wholes) == 1 else term("pieces", tuple(units))


@lru_cache(maxsize=4096)
def true_states(
    num_types: int,
    micro_batches: int,
    stages: int,
    width: int,
    version: int,
    order: Order = Order.IN_ORDER,
) -> tuple[str, ...]:
    """States of all positions (``width`` per stage) at ``version`` in a run without failures."""
    positions = range(stages * width)
    if version == 0:
        return tuple(initial_state(position) for position in positions)
    params = true_states(num_types, micro_batches, stages, width, version - 1, order)
    step = version - 1
    gradients: list[list[str]] = [[] for _ in positions]
    for shard_type in range(num_types):
        flows: list[list[Passed]] = [[] for _ in positions]
        for micro_batch in range(micro_batches):
            route = route_of(order, shard_type * micro_batches + micro_batch, stages)
            x = sample(step, shard_type, micro_batch)
            for position, passed in _pass(route, width, x, params):
                flows[position].append(passed)
        for position in positions:
            gradients[position].append(weight_gradient(tuple(flows[position])))
    scale = scale_of(num_types, stages, width)
    return tuple(applied(params[p], reduced(tuple(gradients[p])), scale) for p in positions)


def _pass(route: Route, width: int, x: str, params: Sequence[str]) -> Iterator[tuple[int, Passed]]:
    """Take a sample along a route and back; yield what it leaves where, in backward order."""
    inputs = [x]
    for stage, extent in route:
        cell = range(stage * width, (stage + 1) * width)
        outputs = [forward(p, inputs[-1], params[p], extent) for p in cell]
        inputs.append(mixed(tuple(outputs)))
    gradient = ""
    for (stage, extent), received in zip(reversed(route), reversed(inputs[:-1]), strict=True):
        parts = []
        for position in range(stage * width, (stage + 1) * width):
            yield position, (received, gradient, params[position], extent)
            parts.append(backward(position, received, gradient, params[position], extent))
        gradient = mixed(tuple(parts))
