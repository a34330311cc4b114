"""Judges what several chains told of one shard type that all of them computed.

A device that is wrong in the same way each time gives the same wrong bits twice, so no execution of
its own shows it. In some steps a second chain, the witness, computes a type too. Each cell tells a
digest of everything that left it: what it sent to its neighbours, what it told of the type, and its
gradient. What comes first in the type's computation and differs was computed wrongly by one of two
devices; a third chain says by which.

Where a stage has several ranks, one that is wrong spoils what all of them get from the next
collective. So each tells digests of what it gave to every collective as well, and of what it got.
What went in wrongly was computed by the rank that gave it. What came out wrongly on all ranks any
of them may have added up, so the whole cell is suspected, and no single device is named.

These are pure functions: every rank calls them with the same votes and comes to the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from mainstay_core.base.bounds import MAX_EXCHANGES, Digest, Index, Longest
from mainstay_core.base.ids import Slot
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict

MIN_CHAINS = 2
"""Chains that it takes to see that a device is wrong. To say which one takes a third device."""
ALL_AGREE = "all chains agree"
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


Digests = Annotated[tuple[Digest, ...], Longest(MAX_EXCHANGES)]
"""By collective, in the order of execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Digests of what a rank gave to the collectives of its cell in a pass, and of what it got."""

    in_pass: Pass
    micro_batch: Index
    given: Digests
    made: Digests
    """Where each rank gets a part of its own, the digest says whose it is: equal parts differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The digests of all that left one cell while it computed a type."""

    forward: tuple[str, ...] = ()
    """Of what it sent to the next stage, by micro-batch; of the loss, on the last stage."""
    backward: tuple[str, ...] = ()
    """Of what it sent to the stage before, by micro-batch."""
    weights: tuple[str, ...] = ()
    """Of the type's gradient, by block."""
    exchanged: tuple[Exchanged, ...] = ()
    """Of the collectives of its cell, by pass and micro-batch; nothing where a stage has one
    rank."""
    is_partial: bool = field(default=False, compare=False)
    """Whether it has taken part in collectives of which it does not tell."""


Telling = tuple[Account, ...]
"""The accounts of a chain's cells, by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place in a type's computation at which two chains differ."""

    position: int
    in_pass: Pass
    micro_batch: int | None = None
    """None of the weights: these are of all micro-batches."""
    exchange: int | None = None
    """Number of the collective in its pass; None: it is what leaves the stage."""
    came_out: bool = False
    """Whether it is what came out of the collective, else what went in."""
    beside: tuple[int, ...] = ()
    """The other positions of the stage, where what all its ranks have is looked at together."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions that are looked at."""
        return (self.position, *self.beside)

    def describe(self) -> str:
        """Return the place for people: ``the forward pass of micro-batch 1``."""
        flow = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        place = f"the {self.in_pass} pass{flow}"
        if self.exchange is None:
            return place
        way = "came out of" if self.came_out else "went into"
        return f"what {way} collective {self.exchange} of {place}"


def first_difference(one: Telling, other: Telling, width: int = 1) -> Difference | None:
    """Return where two chains differ first; None if they do not.

    What a stage computes depends on what comes before it: in a micro-batch the forwards of the
    stages before, then the backwards of those behind. So only the first difference says who was
    wrong. A micro-batch does not depend on another one.

    Args:
        one: of a chain.
        other: of another chain.
        width: ranks of a stage.
    """
    if one == other:
        return None
    return _first_of(_indexed(one), _indexed(other), width)


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
    """TRANSIENT or DETERMINISTIC; WIRE of one of several that compute together."""
    beside: tuple[Slot, ...] = ()
    """The other devices of its cell, if nobody can tell which of them was wrong."""


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


def rule(told: Sequence[Told], width: int = 1) -> Ruling:
    """Return what of a type counts, and which devices computed it wrongly.

    The places of its computation are gone through in order. Up to the first at which two chains
    differ, their devices had the same inputs, so each device there has one voice: what it said
    last. What most of them say counts, and whoever said something else is out from there on. So a
    chain whose cells have changed meanwhile brings no voice twice, and a device that is gone keeps
    its own. What all ranks of a cell have computed together is one voice of all of them, and cells
    that share a device have one between them. A difference is never believed at once: all are asked
    again first, and who then says the same again insists.

    Args:
        told: by all chains, in all attempts at the step.
        width: ranks of a stage.
    """
    ordered = sorted(told, key=lambda t: (*t.asked, t.replica))
    if all(t.telling == ordered[0].telling for t in ordered):
        return Ruling(agreed=ordered[-1].telling, reason=ALL_AGREE)
    is_asked_again = len({t.asked for t in ordered}) > 1
    indexed = [_indexed(t.telling) for t in ordered]
    left = list(zip(ordered, indexed, strict=True))
    for place in _places(indexed, width):
        values = [_values(telling, place) for _, telling in left]
        if len(set(values)) < 2:
            continue
        voices = _voices([t for t, _ in left], values, place)
        top = _majority([value for _, value in voices]) if is_asked_again else None
        if top is None:
            return _undecided(ordered, place, voices)
        left = [one for one, value in zip(left, values, strict=True) if value == top]
    return _ruling(ordered, left[-1][0].telling, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """An account whose collectives are found by pass and micro-batch: there may be thousands."""

    account: Account
    exchanged: Mapping[tuple[Pass, int], Exchanged]


def _indexed(telling: Telling) -> tuple[_Indexed, ...]:
    return tuple(
        _Indexed(
            account=account,
            # Of several with one name the first counts.
            exchanged={(e.in_pass, e.micro_batch): e for e in reversed(account.exchanged)},
        )
        for account in telling
    )


Read = Sequence[_Indexed]
"""The accounts of a chain's cells, by position."""
Values = tuple[tuple[str, ...], ...]
"""What a chain tells at a place, by position; an empty one where it tells nothing."""


def _places(tellings: Sequence[Read], width: int) -> Iterator[Difference]:
    """Yield the places of a type's computation, each behind those on which it depends."""
    num_positions = len(tellings[0]) if tellings else 0
    cells = [range(first, first + width) for first in range(0, num_positions, width)]
    accounts = [each.account for telling in tellings for each in telling]
    flows = [len(a.forward) for a in accounts] + [len(a.backward) for a in accounts]
    flows += [1 + e.micro_batch for a in accounts for e in a.exchanged]
    for micro_batch in range(max(flows, default=0)):
        for in_pass, order in ((Pass.FORWARD, cells), (Pass.BACKWARD, cells[::-1])):
            for cell in order:
                yield from _exchanges(tellings, cell, in_pass, micro_batch)
                yield from _together(tellings, cell, in_pass, micro_batch)
    for cell in cells:
        for micro_batch in range(max(flows, default=0)):
            yield from _exchanges(tellings, cell, Pass.WEIGHT, micro_batch)
        yield from _together(tellings, cell, Pass.WEIGHT, None)


def _exchanges(
    tellings: Sequence[Read], cell: Sequence[int], in_pass: Pass, micro_batch: int
) -> Iterator[Difference]:
    """Yield the places of a pass's collectives: what each rank gave, then what all of them got."""
    lengths = [
        len(_exchanged(telling[position], in_pass, micro_batch).given)
        for telling in tellings
        for position in cell
    ]
    for exchange in range(max(lengths, default=0)):
        # Where a chain has had fewer, nothing says on which rank that was decided.
        is_told = exchange < min(lengths)
        yield from _together(tellings, cell, in_pass, micro_batch, exchange, is_told=is_told)
        yield Difference(
            position=cell[0],
            beside=tuple(cell[1:]),
            in_pass=in_pass,
            micro_batch=micro_batch,
            exchange=exchange,
            came_out=True,
        )


def _together(
    tellings: Sequence[Read],
    cell: Sequence[int],
    in_pass: Pass,
    micro_batch: int | None,
    exchange: int | None = None,
    *,
    is_told: bool = True,
) -> Iterator[Difference]:
    """Yield the place of each rank of a cell, or one of all if it is not known who had an effect
    on whom.
    """
    is_told = is_told and not _is_partial(tellings, cell)
    positions = [(position,) for position in cell] if is_told else [tuple(cell)]
    for first, *beside in positions:
        yield Difference(
            position=first,
            beside=tuple(beside),
            in_pass=in_pass,
            micro_batch=micro_batch,
            exchange=exchange,
        )


def _is_partial(tellings: Sequence[Read], cell: Sequence[int]) -> bool:
    return any(telling[position].account.is_partial for telling in tellings for position in cell)


def _exchanged(told: _Indexed, in_pass: Pass, micro_batch: int) -> Exchanged:
    exchanged = told.exchanged.get((in_pass, micro_batch))
    if exchanged is not None:
        return exchanged
    return Exchanged(in_pass=in_pass, micro_batch=micro_batch, given=(), made=())


def _first_of(one: Read, other: Read, width: int) -> Difference | None:
    for place in _places((one, other), width):
        if _values(one, place) != _values(other, place):
            return place
    return None


def _values(telling: Read, place: Difference) -> Values:
    return tuple(_value(telling[position], place) for position in place.positions)


def _value(told: _Indexed, place: Difference) -> tuple[str, ...]:
    account = told.account
    if place.micro_batch is None:
        return account.weights
    if place.exchange is not None:
        exchanged = _exchanged(told, place.in_pass, place.micro_batch)
        digests = exchanged.made if place.came_out else exchanged.given
        return digests[place.exchange : place.exchange + 1]
    flows = account.forward if place.in_pass is Pass.FORWARD else account.backward
    return flows[place.micro_batch : place.micro_batch + 1]


def _voices(
    told: Sequence[Told], values: Sequence[Values], place: Difference
) -> list[tuple[frozenset[Slot], Values]]:
    """Return what devices said last at a place; those that have computed together say one thing."""
    voices: list[tuple[frozenset[Slot], Values]] = []
    for one, value in zip(told, values, strict=True):
        devices = frozenset(one.cells[position] for position in place.positions)
        met = [voice for voice in voices if voice[0] & devices]
        joined = devices.union(*(known for known, _ in met))
        voices = [*(voice for voice in voices if voice not in met), (joined, value)]
    return voices


def _majority(values: Sequence[Values]) -> Values | None:
    """Return what more than half of the voices say, and two at least; None if there is nothing."""
    top, num_top = Counter(values).most_common(1)[0]
    return top if num_top > 1 and 2 * num_top > len(values) else None


def _undecided(
    told: Sequence[Told],
    place: Difference,
    voices: Sequence[tuple[frozenset[Slot], Values]],
) -> Ruling:
    chains = ", ".join(str(replica) for replica in sorted({t.replica for t in told}))
    doubted = tuple(sorted({slot for devices, _ in voices for slot in devices}))
    names = ", ".join(map(str, doubted))
    reason = (
        f"replicas {chains} have computed a type differently, first in {place.describe()} of "
        f"position {place.position}: one of {names} is wrong"
    )
    return Ruling(doubted=doubted, reason=reason)


def _ruling(told: Sequence[Told], agreed: Telling, width: int) -> Ruling:
    found: dict[tuple[Slot, ...], list[Difference]] = {}
    for one in told:
        difference = first_difference(one.telling, agreed, width)
        if difference is not None:
            found.setdefault(_suspects(one, agreed, difference), []).append(difference)
    deviations: list[Deviation] = []
    names = []
    for suspects, differences in sorted(found.items()):
        verdict = Verdict.DETERMINISTIC if len(differences) > 1 else Verdict.TRANSIENT
        if len(suspects) > 1:
            verdict = Verdict.WIRE
        for slot in suspects:
            beside = tuple(other for other in suspects if other != slot)
            deviations.append(
                Deviation(slot=slot, beside=beside, difference=differences[-1], verdict=verdict)
            )
        shown = ", ".join(map(str, suspects))
        names.append(
            f"one of {shown}, which compute together"
            if len(suspects) > 1
            else f"{shown} ({verdict})"
        )
    return Ruling(
        agreed=agreed,
        deviations=tuple(deviations),
        reason=f"computed wrongly: {', '.join(names)}" if names else ALL_AGREE,
    )


def _suspects(one: Told, agreed: Telling, place: Difference) -> tuple[Slot, ...]:
    """Return who may have been wrong at a chain's first difference from what counts, sorted.

    What came out of a collective wrongly on one rank alone, where all should get the same, is laid
    to that rank. A sum of which each rank gets a part of its own says nothing: others have added
    to it. What such a part is told by says of which rank it is, so parts never look the same.
    """
    mine, right = _values(_indexed(one.telling), place), _values(_indexed(agreed), place)
    pairs = zip(place.positions, mine, right, strict=True)
    wrong = [position for position, value, other in pairs if value != other]
    is_shared = place.came_out and len(set(right)) == 1
    accounts = [telling[p] for telling in (one.telling, agreed) for p in place.positions]
    if len(wrong) == 1 and is_shared and not any(account.is_partial for account in accounts):
        return (one.cells[wrong[0]],)
    return tuple(sorted(one.cells[position] for position in place.positions))
