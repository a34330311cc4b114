"""Makes a profile of several recorded passages of one stage.

The passages have different data. What has the same shapes in all of them is static. What an
operator is, and what it reads, is told by the fullest passage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import median

from mainstay_core.dmr.operators import Operator, Pass, Tensor
from mainstay_core.dmr.profiles import WHOLE_WAY, AcSegment, Profile, Window, WindowKind
from mainstay_core.dmr.schedule import NEXT_RECV, NEXT_RECV_B
from mainstay_train.dmr.recorder import Call, Passage

WAITS = ("RECV_B", "RECV_F", NEXT_RECV_B, "REDUCE")
"""The waits of a stage, by the actions of its program."""
Group = tuple[int, Pass]
"""A block and one of its passes."""


def make_profile(
    passages: Sequence[Passage],
    *,
    fingerprint: str,
    stage: int,
    budget_bytes: int,
    windows: Sequence[Window] = (),
    way: str = WHOLE_WAY,
) -> Profile:
    """Return the profile of a stage.

    Args:
        passages: of equal settings and different data; one at least.
        fingerprint: of the job.
        stage: the stage.
        budget_bytes: the most that checks may retain of one passage.
        windows: see :func:`plan_windows`.
        way: of the micro-batches through the stage.
    """
    fullest = fullest_of(passages)
    statics, seconds = _compare(fullest, passages)
    operators = tuple(
        Operator(
            block=call.block,
            in_pass=call.in_pass,
            ordinal=call.ordinal,
            name=call.name,
            inputs=call.inputs,
            outputs=call.outputs,
            median_s=median(seconds[place]),
            static=statics[place],
            overwrites=call.overwrites,
            waits=call.waits,
        )
        for place, call in enumerate(fullest.calls)
    )
    used = {name for call in fullest.calls for name in (*call.inputs, *call.outputs)}
    used |= set(fullest.results)
    return Profile(
        fingerprint=fingerprint,
        stage=stage,
        budget_bytes=budget_bytes,
        tensors=tuple(
            Tensor(name=name, size_bytes=size, origin=origin)
            for name, (size, origin) in fullest.tensors.items()
            if name in used
        ),
        operators=operators,
        results=tuple(fullest.results),
        ac_segments=_find_segments(fullest, passages),
        windows=tuple(windows),
        way=way,
    )


def plan_windows(
    passage: Passage,
    *,
    stage: int,
    num_stages: int,
    num_passages: int,
    replicas: int,
    lengths: Mapping[str, tuple[float, float]],
    headroom_bytes: int,
) -> tuple[Window, ...]:
    """Return the waits of a stage in one passage, of lengths that are given.

    In the order of 1F1B: RECV_B behind the forward, where a stage follows. Behind the backward
    comes RECV_F of the next micro-batch, or its RECV_B in the first stage, where a step has
    several; or the reduction, where a step has one. The first stage's waits serve two passages
    each, and are planned as if they served one: an overrun costs no more than checks at once. Of a
    step with several the reduction is left out: it comes once, and what all passages leave to it
    would have to be retained until then.

    Args:
        passage: of the stage.
        stage: the stage.
        num_stages: of a chain.
        num_passages: micro-batches that a chain computes in a step.
        replicas: cells that reduce together.
        lengths: median and least seconds of each wait; one that is not named is left out.
        headroom_bytes: memory that checks may retain in each.
    """
    forward = [n for n, c in enumerate(passage.calls, 1) if c.in_pass is Pass.FORWARD]
    places: list[tuple[str, int]] = []
    if stage < num_stages - 1:
        places.append(("RECV_B", max(forward, default=0)))
    if num_passages == 1 and replicas > 1:
        places.append(("REDUCE", len(passage.calls)))
    elif num_passages > 1 and num_stages > 1:
        places.append(("RECV_F" if stage > 0 else NEXT_RECV_B, len(passage.calls)))
    return _windows_at(places, lengths, headroom_bytes)


def plan_routed_windows(
    passage: Passage,
    *,
    num_passages: int,
    replicas: int,
    lengths: Mapping[str, tuple[float, float]],
    headroom_bytes: int,
) -> tuple[Window, ...]:
    """Return the waits of a stage in one passage where micro-batches take two routes.

    Within the passage they are what was seen: between the two visits, and behind their forwards and
    backwards. Behind it comes whatever is received next.

    Args:
        passage: of the stage.
        num_passages: micro-batches that a chain computes in a step.
        replicas: cells that reduce together.
        lengths: median and least seconds of each wait; one that is not named has not come.
        headroom_bytes: memory that checks may retain in each.
    """
    places = [(name, after) for name, after in passage.waits if after > 0]
    if num_passages > 1:
        places.append((NEXT_RECV, len(passage.calls)))
    elif replicas > 1:
        places.append(("REDUCE", len(passage.calls)))
    known = {name: lengths.get(name, (0.0, 0.0)) for name, _ in places}
    return _windows_at(places, known, headroom_bytes)


def _windows_at(
    places: Sequence[tuple[str, int]],
    lengths: Mapping[str, tuple[float, float]],
    headroom_bytes: int,
) -> tuple[Window, ...]:
    return tuple(
        Window(
            name=name,
            after=after,
            kind=WindowKind.INTER,
            median_s=lengths[name][0],
            least_s=lengths[name][1],
            headroom_bytes=headroom_bytes,
        )
        for name, after in places
        if name in lengths
    )


def fullest_of(passages: Sequence[Passage]) -> Passage:
    """Return the passage that makes most bytes; of equal ones the first."""
    return max(passages, key=_made_bytes)


def _made_bytes(passage: Passage) -> int:
    return sum(passage.tensors[name][0] for call in passage.calls for name in call.outputs)


def _find_segments(fullest: Passage, passages: Sequence[Passage]) -> tuple[AcSegment, ...]:
    """Return what is recomputed of each block: all of it runs again, its last operator included.

    A block whose recompute is not its forward, call by call, has none.
    """
    found: dict[int, list[str]] = {}
    for call in fullest.calls:
        if call.id in fullest.recomputed:
            found.setdefault(call.block, []).append(call.id)
    return tuple(
        AcSegment(name=f"{block}/recompute", operators=tuple(operators), kept=())
        for block, operators in found.items()
        if all(_repeats(passage, block) for passage in passages)
    )


def _repeats(passage: Passage, block: int) -> bool:
    """Return whether a block's recompute calls what its forward has called, in order, and no more.

    A trainer compares them call by call: what is called beyond the forward it has nothing for.
    """
    forward = [
        call.id for call in passage.calls if (call.block, call.in_pass) == (block, Pass.FORWARD)
    ]
    return passage.again.get(block, []) == forward


def _compare(
    fullest: Passage, passages: Sequence[Passage]
) -> tuple[list[bool], list[tuple[float, ...]]]:
    """Return of each call whether it is static, and the seconds of its executions."""
    groups = _by_group(fullest)
    statics = [True] * len(fullest.calls)
    seconds: list[list[float]] = [[] for _ in fullest.calls]
    for passage in passages:
        others = _by_group(passage)
        for group, places in groups.items():
            pairs = _align(
                [fullest.calls[place] for place in places],
                [passage.calls[place] for place in others.get(group, ())],
            )
            for at, place in enumerate(places):
                other = pairs[at]
                if other is None:
                    statics[place] = False
                    continue
                found = others[group][other]
                seconds[place].append(passage.seconds[found])
                if passage.calls[found].shapes != fullest.calls[place].shapes:
                    statics[place] = False
    for places in groups.values():
        _close(places, statics)
    return statics, [tuple(taken) for taken in seconds]


def _by_group(passage: Passage) -> dict[Group, list[int]]:
    found: dict[Group, list[int]] = {}
    for place, call in enumerate(passage.calls):
        found.setdefault((call.block, call.in_pass), []).append(place)
    return found


def _align(calls: Sequence[Call], others: Sequence[Call]) -> list[int | None]:
    """Return which of the others is the same operator as each call; None: that is not known.

    Where some are missing, those before and behind are told by name and shapes.
    """
    if [call.name for call in calls] == [call.name for call in others]:
        return list(range(len(calls)))
    before = _count_equal(calls, others)
    behind = _count_equal(calls[before:][::-1], others[before:][::-1])
    middle = len(calls) - before - behind
    last = range(len(others) - behind, len(others))
    return [*range(before), *[None] * middle, *last]


def _count_equal(calls: Sequence[Call], others: Sequence[Call]) -> int:
    pairs = zip(calls, others, strict=False)
    equal = takewhile(lambda p: (p[0].name, p[0].shapes) == (p[1].name, p[1].shapes), pairs)
    return sum(1 for _ in equal)


def _close(places: Sequence[int], statics: list[bool]) -> None:
    """Take all between two operators that are not static for such: their shapes may have been
    equal by chance, as those of experts that had as many tokens.
    """
    varying = [at for at, place in enumerate(places) if not statics[place]]
    if varying:
        for place in places[varying[0] : varying[-1] + 1]:
            statics[place] = False
