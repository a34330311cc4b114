"""Judges what several chains told of one shard type that all of them computed.

A device that is wrong in the same way each time gives the same wrong bits twice, so no execution of
its own shows it. In some steps a second chain, the witness, computes a type too. Each cell tells a
digest of everything that left it: what it sent to its neighbours, what it told of the type, and its
gradient. What comes first in the type's computation and differs was computed wrongly by one of two
devices; a third chain says by which.

These are pure functions: every rank calls them with the same votes and comes to the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict

MIN_CHAINS = 3
"""Chains that it takes to say which of two that differ is wrong."""


def turn_of(step: int, every_steps: int, num_chains: int) -> tuple[int, int] | None:
    """Return the places of the chain that is witnessed in a step and of its witness.

    In a round of ``n (n - 1)`` witnessed steps each chain is witnessed by each other once, and in
    any n of them that begin with a round each chain is witnessed.

    Args:
        step: the step.
        every_steps: in each step that is a multiple of it somebody is witnessed; 0: in none.
        num_chains: n, the whole replicas.
    """
    if every_steps < 1 or num_chains < MIN_CHAINS or step % every_steps:
        return None
    shift, place = divmod((step // every_steps) % (num_chains * (num_chains - 1)), num_chains)
    return place, (place + 1 + shift) % num_chains


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The digests of all that left one cell while it computed a type."""

    forward: tuple[str, ...] = ()
    """Of what it sent to the next stage, by micro-batch; of the loss, on the last stage."""
    backward: tuple[str, ...] = ()
    """Of what it sent to the stage before, by micro-batch."""
    weights: tuple[str, ...] = ()
    """Of the type's gradient, by block."""


Telling = tuple[Account, ...]
"""The accounts of a chain's cells, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place in a type's computation at which two chains differ."""

    position: int
    in_pass: Pass
    micro_batch: int | None = None
    """None of the weights: these are of all micro-batches."""


def first_difference(one: Telling, other: Telling) -> Difference | None:
    """Return where two chains differ first; None if they do not.

    What a stage computes depends on what comes before it: in a micro-batch the forwards of the
    stages before, then the backwards of those behind. So only the first difference says who was
    wrong. A micro-batch does not depend on another one.
    """
    num_flows = max((len(a.forward) for a in (*one, *other)), default=0)
    for micro_batch in range(num_flows):
        for position, pair in enumerate(zip(one, other, strict=True)):
            if _differ(pair[0].forward, pair[1].forward, micro_batch):
                return Difference(position=position, in_pass=Pass.FORWARD, micro_batch=micro_batch)
        for position, pair in reversed([*enumerate(zip(one, other, strict=True))]):
            if _differ(pair[0].backward, pair[1].backward, micro_batch):
                return Difference(position=position, in_pass=Pass.BACKWARD, micro_batch=micro_batch)
    for position, pair in enumerate(zip(one, other, strict=True)):
        if pair[0].weights != pair[1].weights:
            return Difference(position=position, in_pass=Pass.WEIGHT)
    return None


def _differ(one: Sequence[str], other: Sequence[str], index: int) -> bool:
    pairs = [*zip_longest(one, other)]
    return index < len(pairs) and pairs[index][0] != pairs[index][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A cell that computed something wrongly, as the other chains show."""

    replica: int
    difference: Difference
    verdict: Verdict
    """TRANSIENT or DETERMINISTIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The result of what several chains tell of a type."""

    agreed: Telling | None = None
    """What counts; None: too few agree, or those who differ have not been asked again."""
    deviations: tuple[Deviation, ...] = ()
    """Who was wrong, once something is agreed on; by replica."""
    reason: str = ""
    """Why the type does not count, or who was wrong, for people."""


def rule(rounds: Sequence[Mapping[int, Telling]]) -> Ruling:
    """Return whose copies of a type count, and which devices computed it wrongly.

    A difference is never believed at once: all are asked again, and a third chain is. Then what
    most of them tell counts, and a chain that differs from it again insists.

    Args:
        rounds: by replica what its chain told, in each attempt in which several chains computed the
            type. The last one is judged.
    """
    last = rounds[-1]
    counts = Counter(last.values())
    top, num_top = max(counts.items(), key=lambda item: item[1])
    if len(counts) == 1:
        return _ruling(rounds, top)
    if len(rounds) > 1 and num_top >= 2 and 2 * num_top > len(last):
        return _ruling(rounds, top)
    chains = ", ".join(map(str, sorted(last)))
    return Ruling(reason=f"replicas {chains} have computed a type differently")


def _ruling(rounds: Sequence[Mapping[int, Telling]], agreed: Telling) -> Ruling:
    found: dict[int, list[Difference]] = {}
    for told in rounds:
        for replica, telling in told.items():
            difference = first_difference(telling, agreed)
            if difference is not None:
                found.setdefault(replica, []).append(difference)
    deviations = tuple(
        Deviation(
            replica=replica,
            difference=differences[-1],
            verdict=Verdict.DETERMINISTIC if len(differences) > 1 else Verdict.TRANSIENT,
        )
        for replica, differences in sorted(found.items())
    )
    names = ", ".join(f"replica {d.replica} ({d.verdict})" for d in deviations)
    return Ruling(
        agreed=agreed,
        deviations=deviations,
        reason=f"computed wrongly: {names}" if names else "all chains agree",
    )
