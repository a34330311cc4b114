"""Values as canonical terms: what a number was made of, instead of the number.

The bits of a state or gradient are the hash of everything that went into them.
A type counted twice or left out, an activation of another step, a contribution
computed from stale parameters: each yields another term than the failure-free
run, for certain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mainstay_core.base.shape import Order
from mainstay_core.planning.routes import Extent, Route, route_of
from mainstay_core.rank.votes import clip
from mainstay_core.wire.reinitialisation import (
    BlockOutline,
    BlockSource,
    History,
    MadePosition,
    OptimizerState,
    Outline,
    SourceKind,
)

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


Boosts = tuple[tuple[str, float], ...]
"""Factors of the learning rate, by block, in order; without those that are 1."""


def applied(params: str, gradient: str, scale: float, boosts: Boosts = ()) -> str:
    """A position's state after one more step."""
    return term("applied", params, gradient, scale, boosts)


_PART_OF: dict[str, str] = {}
"""By the state of an end of a swapped pipeline what it alone has, which guards keep."""


def part(state: str) -> str:
    """What an end alone has, of its state."""
    return _PART_OF.get(state) or term("part", state)


def part_applied(own: str, gradient: str, scale: float) -> str:
    """The same after one more step."""
    return term("part applied", own, gradient, scale)


def applied_end(params: str, gradient: str, scale: float, boosts: Boosts = ()) -> str:
    """An end's state after one more step; what it alone has follows from that alone."""
    state = applied(params, gradient, scale, boosts)
    _PART_OF[state] = part_applied(part(params), gradient, scale)
    return state


@lru_cache(maxsize=256)
def blocks_of(
    stage: int, stages: int = 0, order: Order = Order.IN_ORDER
) -> tuple[BlockOutline, ...]:
    """The blocks of a stage: one or two of one kind, as stages differ, and one of another.

    In a swapped pipeline twins are alike, and each end has a block that no other stage has.
    """
    if order is not Order.IN_ORDER:
        kinds = ("embed",) * (stage == 0) + ("layer", "norm") + ("head",) * (stage == stages - 1)
        return tuple(BlockOutline(name=f"{stage}.{kind}", kind=kind) for kind in kinds)
    layers = [BlockOutline(name=f"{stage}.layer{i}", kind="layer") for i in range(1 + stage % 2)]
    return (*layers, BlockOutline(name=f"{stage}.norm", kind="norm"))


@lru_cache(maxsize=64)
def outline(stages: int, order: Order = Order.IN_ORDER) -> Outline:
    """The blocks of every stage."""
    return tuple(blocks_of(stage, stages, order) for stage in range(stages))


def boosts_in(blocks: Sequence[BlockOutline], factors: Mapping[str, float]) -> Boosts:
    """Factors of a stage's blocks."""
    named = ((block.name, factors.get(block.name, 1.0)) for block in blocks)
    return tuple((name, factor) for name, factor in named if factor != 1.0)


def made(place: MadePosition, states: Mapping[tuple[int, int], str], guarded: str = "") -> str:
    """A position's state that was made anew of others.

    Args:
        place: of what each of its blocks was made, in the order in which that is added up.
        states: of the positions of which it was made.
        guarded: what guards had of it.
    """
    blocks = tuple(
        (
            block.block,
            *((s.block, s.weight, _had(s, states, guarded)) for s in block.sources),
        )
        for block in place.blocks
    )
    averages = place.optimizer_state is OptimizerState.AVERAGE
    state = term("made with moments" if averages else "made", blocks)
    if guarded:
        _PART_OF[state] = guarded
    return state


def _had(source: BlockSource, states: Mapping[tuple[int, int], str], guarded: str) -> str:
    is_guard = source.kind is SourceKind.GUARD
    return guarded if is_guard else states[source.stage, source.inner]


def norms_sq(blocks: Sequence[BlockOutline], gradient: str | None) -> tuple[float, ...]:
    """The squared norms of a position's blocks, in model order: they tell gradients apart."""
    return tuple(1.0 + int(term("norm", block.name, gradient)[:8], 16) / 2**32 for block in blocks)


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


def unit_applied(
    state: UnitTerm, gradient: UnitTerm, scale: float, boosts: Boosts = ()
) -> UnitTerm:
    """A unit's state after one more step, by its part of the gradient."""
    unit, params = state
    if gradient[0] != unit:
        return unit, term("misapplied", state, gradient)
    return unit, applied(params, gradient[1], scale, boosts)


def whole_of(units: Sequence[UnitTerm]) -> str:
    """The state or gradient that all units are together: another one unless all are its parts."""
    wholes = {whole for _, whole in units}
    fits = [unit for unit, _ in units] == list(range(len(units)))
    return wholes.pop() if fits and len(wholes) == 1 else term("pieces", tuple(units))


class Course(NamedTuple):
    """The course of a job up to a version, without failures but for its forks."""

    states: tuple[str, ...]
    """Of all positions."""
    norms_sq: tuple[float, ...] = ()
    """Of all blocks, in model order, in the step that led to it; empty at version 0."""


@lru_cache(maxsize=4096)
def true_course(
    num_types: int,
    micro_batches: int,
    stages: int,
    width: int,
    version: int,
    history: History,
    order: Order = Order.IN_ORDER,
) -> Course:
    """The course of a job (``width`` positions per stage) up to ``version``, without failures.

    Its forks are those of ``history``.
    """
    before = tuple(fork for fork in history if fork.version < version)
    course = _without_forks(num_types, micro_batches, stages, width, version, before, order)
    for fork in history[len(before) :]:
        places = {divmod(p, width): state for p, state in enumerate(course.states)}
        shape = num_types, micro_batches, stages, width
        anew = {
            (p.stage, p.inner): _loaded(p, shape, before, order) or _made_of(p, places)
            for p in fork.made.positions
        }
        course = course._replace(states=tuple((places | anew).values()))
    return course


def _loaded(
    place: MadePosition, shape: tuple[int, int, int, int], history: History, order: Order
) -> str:
    """A position's state that was loaded alone from an older version; empty if it was not."""
    versions = {s.version for block in place.blocks for s in block.sources} - {None}
    if not versions:
        return ""
    (version,) = versions
    assert version is not None
    course = true_course(*shape, version, history_of(history, version), order)
    return course.states[place.stage * shape[3] + place.inner]


def history_of(history: History, version: int) -> History:
    """The forks that a state at a version contains, which is none of a fork."""
    return tuple(fork for fork in history if fork.version < version)


def _made_of(place: MadePosition, states: Mapping[tuple[int, int], str]) -> str:
    has_guard = any(block.is_exact for block in place.blocks)
    return made(place, states, part(states[place.stage, place.inner]) if has_guard else "")


def _true_boosts(
    history: History, step: int, stage: int, inner: int, blocks: Sequence[BlockOutline]
) -> Boosts:
    """Factors of a position's learning rates: of each block by the last time that it was made."""
    found: dict[str, float] = {}
    for fork in history:
        for place in fork.made.positions:
            if (place.stage, place.inner) == (stage, inner):
                lasts = fork.boost_steps is None or step - fork.version < fork.boost_steps
                for block in place.blocks:
                    if block.sources[0].kind is not SourceKind.GUARD:
                        found[block.block] = fork.lr_boost if lasts else 1.0
    return boosts_in(blocks, found)


def _without_forks(
    num_types: int,
    micro_batches: int,
    stages: int,
    width: int,
    version: int,
    history: History,
    order: Order,
) -> Course:
    """The course up to a version, before the forks at it."""
    positions = range(stages * width)
    if version == 0:
        return Course(tuple(initial_state(position) for position in positions))
    shape = num_types, micro_batches, stages, width
    params = true_course(*shape, version - 1, history, order).states
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
    sums = [reduced(tuple(gradients[p])) for p in positions]
    blocks = outline(stages, order)
    told = [norms_sq(blocks[p // width], sums[p]) for p in positions]
    by_block = [
        block
        for stage in range(stages)
        for block in zip(*told[stage * width : (stage + 1) * width], strict=True)
    ]
    # As votes add them: the last bit of a scale depends on the order.
    scale = clip([n for block in by_block for n in block], TOKENS * num_types, CLIP_NORM)[1]
    return Course(
        tuple(
            (applied_end if order is Order.SWAPPED and place[0] in (0, stages - 1) else applied)(
                params[p], sums[p], scale, _true_boosts(history, step, *place, blocks[place[0]])
            )
            for p in positions
            for place in [divmod(p, width)]
        ),
        tuple(_added(block) for block in by_block),
    )


def _added(block: tuple[float, ...]) -> float:
    total = 0.0
    for norm_sq in block:  # left to right, as all sums
        total += norm_sq
    return total


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
