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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mainstay_core.base.ids import Slot
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict

MIN_CHAINS = 2
"""Chains that it takes to see that a device is wrong. To say which one takes a third device."""
MAX_TOLD = 24
"""Accounts of chains that are remembered of a type; the oldest go first. Three chains are asked at
a time."""


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

    def describe(self) -> str:
        """Return the place for people: ``the forward pass of micro-batch 1``."""
        flow = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"the {self.in_pass} pass{flow}"


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
class Told:
    """The accounts that one chain has given of a type, in one attempt."""

    quorum: int
    """Id of the quorum in which it computed the type."""
    attempt: int
    """Of the step, in that quorum."""
    replica: int
    """Of the chain, in that quorum's plan."""
    cells: tuple[Slot, ...]
    """The devices that computed, by position."""
    telling: Telling

    @property
    def asked(self) -> tuple[int, int]:
        """Return when it was asked: what is told at the same time was asked for once."""
        return self.quorum, self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A device that computed something wrongly, as others show."""

    slot: Slot
    difference: Difference
    verdict: Verdict
    """TRANSIENT or DETERMINISTIC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The result of what several chains tell of a type."""

    agreed: Telling | None = None
    """What counts; None: too few agree, or those who differ have not been asked again."""
    deviations: tuple[Deviation, ...] = ()
    """Who was wrong, once something is agreed on; by slot."""
    doubted: tuple[Slot, ...] = ()
    """The devices between which nobody can decide yet, sorted; empty once something is agreed on.
    All of them have computed the same from the same inputs."""
    reason: str = ""
    """Why the type does not count, or who was wrong, for people."""


def rule(told: Sequence[Told]) -> Ruling:
    """Return what of a type counts, and which devices computed it wrongly.

    The places of its computation are gone through in order. Up to the first at which two chains
    differ, their devices had the same inputs, so each device there has one voice: what it said
    last. What most of them say counts, and whoever said something else is out from there on. So a
    chain whose cells have changed meanwhile brings no voice twice, and a device that is gone keeps
    its own. A difference is never believed at once: all are asked again first, and who then says
    the same again insists.

    Args:
        told: by all chains, in all attempts at the step.
    """
    ordered = sorted(told, key=lambda t: (*t.asked, t.replica))
    is_asked_again = len({t.asked for t in ordered}) > 1
    left = ordered
    for place in _places(ordered):
        values = [_value(t.telling, place) for t in left]
        if len(set(values)) < 2:
            continue
        voices = {t.cells[place.position]: v for t, v in zip(left, values, strict=True)}
        top = _majority(tuple(voices.values())) if is_asked_again else None
        if top is None:
            return _undecided(ordered, place, voices)
        left = [t for t, value in zip(left, values, strict=True) if value == top]
    return _ruling(ordered, left[-1].telling)


def _places(told: Sequence[Told]) -> Iterator[Difference]:
    """Yield the places of a type's computation, each behind those on which it depends."""
    num_positions = len(told[0].telling) if told else 0
    flows = [len(a.forward) for t in told for a in t.telling]
    flows += [len(a.backward) for t in told for a in t.telling]
    for micro_batch in range(max(flows, default=0)):
        for position in range(num_positions):
            yield Difference(position=position, in_pass=Pass.FORWARD, micro_batch=micro_batch)
        for position in reversed(range(num_positions)):
            yield Difference(position=position, in_pass=Pass.BACKWARD, micro_batch=micro_batch)
    for position in range(num_positions):
        yield Difference(position=position, in_pass=Pass.WEIGHT)


def _value(telling: Telling, place: Difference) -> tuple[str, ...]:
    account = telling[place.position]
    if place.in_pass is Pass.WEIGHT:
        return account.weights
    flows = account.forward if place.in_pass is Pass.FORWARD else account.backward
    assert place.micro_batch is not None
    return flows[place.micro_batch : place.micro_batch + 1]


def _majority(values: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return what more than half of the devices say, and two at least; None if there is nothing."""
    top, num_top = Counter(values).most_common(1)[0]
    return top if num_top > 1 and 2 * num_top > len(values) else None


def _undecided(
    told: Sequence[Told], place: Difference, voices: Mapping[Slot, tuple[str, ...]]
) -> Ruling:
    chains = ", ".join(str(replica) for replica in sorted({t.replica for t in told}))
    doubted = tuple(sorted(voices))
    names = ", ".join(map(str, doubted))
    reason = (
        f"replicas {chains} have computed a type differently, first in {place.describe()} of "
        f"position {place.position}: one of {names} is wrong"
    )
    return Ruling(doubted=doubted, reason=reason)


def _ruling(told: Sequence[Told], agreed: Telling) -> Ruling:
    found: dict[Slot, list[Difference]] = {}
    for one in told:
        difference = first_difference(one.telling, agreed)
        if difference is not None:
            found.setdefault(one.cells[difference.position], []).append(difference)
    deviations = tuple(
        Deviation(
            slot=slot,
            difference=differences[-1],
            verdict=Verdict.DETERMINISTIC if len(differences) > 1 else Verdict.TRANSIENT,
        )
        for slot, differences in sorted(found.items())
    )
    names = ", ".join(f"{d.slot} ({d.verdict})" for d in deviations)
    return Ruling(
        agreed=agreed,
        deviations=deviations,
        reason=f"computed wrongly: {names}" if names else "all chains agree",
    )
