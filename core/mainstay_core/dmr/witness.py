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

In a swapped pipeline micro-batches take two routes, and may pass a stage twice. There what is told
names its place on the micro-batch's route, and that decides what comes first: the number of a stage
says nothing of it.

These are pure functions: every rank calls them with the same votes and comes to the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from mainstay_core.base.bounds import MAX_EXCHANGES, Digest, Index, Longest
from mainstay_core.base.codec import OMITTED
from mainstay_core.base.ids import Hardware, Slot
from mainstay_core.dmr.devices import Devices, devices_of
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
    visit: Index | None = field(default=None, metadata=OMITTED)
    """Place on the micro-batch's route; None where all micro-batches pass the stages in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The digest of what a rank sent to another stage, where micro-batches take two routes."""

    in_pass: Pass
    """FORWARD or BACKWARD."""
    micro_batch: Index
    visit: Index
    """The sender's place on the micro-batch's route."""
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The digests of all that left one cell while it computed a type."""

    forward: tuple[str, ...] = ()
    """Of what it sent to the next stage, by micro-batch."""
    backward: tuple[str, ...] = ()
    """Of what it sent to the stage before, by micro-batch."""
    sent: tuple[Sent, ...] = ()
    """Both, where micro-batches take two routes."""
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
    visit: int | None = None
    """Place on the micro-batch's route; None where all micro-batches pass the stages in order."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions that are looked at."""
        return (self.position, *self.beside)

    def describe(self) -> str:
        """Return the place for people: ``the forward pass of micro-batch 1``."""
        flow = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        visit = "" if self.visit is None else f" (visit {self.visit} of its route)"
        place = f"the {self.in_pass} pass{flow}{visit}"
        if self.exchange is None:
            return place
        way = "came out of" if self.came_out else "went into"
        return f"what {way} collective {self.exchange} of {place}"


def first_difference(one: Telling, other: Telling, width: int = 1) -> Difference | None:
    """Return where two chains differ first; None if they do not.

    What a stage computes depends on what comes before it on the micro-batch's route: the forwards
    of the visits before, then the backwards of those behind. So only the first difference says who
    was wrong. A micro-batch does not depend on another one.

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
    hardware: tuple[Hardware | None, ...] = ()
    """What they ran on, by position; empty, or None, where nobody knows."""

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


def rule(told: Sequence[Told], width: int = 1, members: Collection[Slot] = ()) -> Ruling:
    """Return what of a type counts, and which devices computed it wrongly.

    The places of its computation are gone through in order. Up to the first at which two chains
    differ, their devices had the same inputs, so each device there has one voice: what it said
    last. What most of them say counts, and whoever said something else is out from there on. So a
    chain whose cells have changed meanwhile brings no voice twice, and a device that is gone keeps
    its own. Slots that may be one device have one voice (:mod:`mainstay_core.dmr.devices`). What
    all ranks of a cell have computed together is one voice of all of them, and cells that share a
    device have one between them. A difference is never believed at once: all are asked again first,
    and who then says the same again insists.

    Args:
        told: by all chains, in all attempts at the step.
        width: ranks of a stage.
        members: slots of the quorum at hand: they serve at the same time.
    """
    ordered = sorted(told, key=lambda t: (*t.asked, t.replica))
    if all(t.telling == ordered[0].telling for t in ordered):
        return Ruling(agreed=ordered[-1].telling, reason=ALL_AGREE)
    is_asked_again = len({t.asked for t in ordered}) > 1
    indexed = [_indexed(t.telling) for t in ordered]
    devices = devices_of([(t.quorum, t.cells, t.hardware) for t in ordered], members)
    left = list(zip(ordered, indexed, strict=True))
    for place in _places(indexed, width):
        values = [_values(telling, place) for _, telling in left]
        if len(set(values)) < 2:
            continue
        voices = _voices([t for t, _ in left], values, place, devices)
        top = _majority([value for _, value in voices]) if is_asked_again else None
        if top is None:
            return _undecided(ordered, place, voices)
        left = [one for one, value in zip(left, values, strict=True) if value == top]
    return _ruling(ordered, left[-1][0].telling, width)


_Key = tuple[Pass, int, int | None]
"""A pass of a micro-batch, and the visit of its route; None in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexed:
    """An account in which all is found by pass, micro-batch and visit: there may be thousands."""

    account: Account
    sent: Mapping[_Key, str]
    exchanged: Mapping[_Key, Exchanged]


def _indexed(telling: Telling) -> tuple[_Indexed, ...]:
    return tuple(
        _Indexed(
            account=account,
            # Of several with one name the first counts.
            sent=dict(reversed(list(_sent_of(account)))),
            exchanged={(e.in_pass, e.micro_batch, e.visit): e for e in reversed(account.exchanged)},
        )
        for account in telling
    )


def _sent_of(account: Account) -> Iterator[tuple[_Key, str]]:
    for in_pass, digests in (
        (Pass.FORWARD, account.forward),
        (Pass.BACKWARD, account.backward),
    ):
        for micro_batch, digest in enumerate(digests):
            yield (in_pass, micro_batch, None), digest
    for sent in account.sent:
        yield (sent.in_pass, sent.micro_batch, sent.visit), sent.digest


Read = Sequence[_Indexed]
"""The accounts of a chain's cells, by position."""
Values = tuple[tuple[str, ...], ...]
"""What a chain tells at a place, by position; an empty one where it tells nothing."""


def _places(tellings: Sequence[Read], width: int) -> Iterator[Difference]:
    """Yield the places of a type's computation, each behind those on which it depends."""
    num_positions = len(tellings[0]) if tellings else 0
    cells = [range(first, first + width) for first in range(0, num_positions, width)]
    routes = _routes(tellings, cells)
    for micro_batch, route in enumerate(routes):
        for in_pass, order in ((Pass.FORWARD, route), (Pass.BACKWARD, route[::-1])):
            for visit, cell in order:
                yield from _exchanges(tellings, cell, (in_pass, micro_batch, visit))
                at = _place(cell, in_pass, micro_batch, visit)
                yield from _together(tellings, cell, at)
    for cell in cells:
        for micro_batch, route in enumerate(routes):
            for visit in [visit for visit, visited in route if visited == cell]:
                yield from _exchanges(tellings, cell, (Pass.WEIGHT, micro_batch, visit))
        yield from _together(tellings, cell, _place(cell, Pass.WEIGHT))


_Visits = list[tuple[int | None, Sequence[int]]]
"""The visits of a route in forward order: the place on it, and the positions of the stage."""


def _routes(tellings: Sequence[Read], cells: Sequence[Sequence[int]]) -> list[_Visits]:
    """Return the route of each micro-batch, as what is told shows it.

    What names no visit was told in a pipeline through which all go in order.
    """
    keys = {
        (stage, key)
        for telling in tellings
        for stage, cell in enumerate(cells)
        for position in cell
        for key in (*telling[position].sent, *telling[position].exchanged)
    }
    num_flows = 1 + max((micro_batch for _, (_, micro_batch, _) in keys), default=-1)
    visited: list[set[tuple[int, int]]] = [set() for _ in range(num_flows)]
    in_order = True
    for stage, (_, micro_batch, visit) in keys:
        if visit is not None:
            visited[micro_batch].add((visit, stage))
            in_order = False
    if in_order:
        return [[(None, cell) for cell in cells] for _ in range(num_flows)]
    return [[(visit, cells[stage]) for visit, stage in sorted(route)] for route in visited]


def _place(
    cell: Sequence[int], in_pass: Pass, micro_batch: int | None = None, visit: int | None = None
) -> Difference:
    """Return a place at which all ranks of a cell are looked at together."""
    return Difference(
        position=cell[0],
        beside=tuple(cell[1:]),
        in_pass=in_pass,
        micro_batch=micro_batch,
        visit=visit,
    )


def _exchanges(tellings: Sequence[Read], cell: Sequence[int], key: _Key) -> Iterator[Difference]:
    """Yield the places of a pass's collectives: what each rank gave, then what all of them got."""
    lengths = [
        len(_exchanged(telling[position], key).given) for telling in tellings for position in cell
    ]
    for exchange in range(max(lengths, default=0)):
        # Where a chain has had fewer, nothing says on which rank that was decided.
        is_told = exchange < min(lengths)
        place = replace(_place(cell, *key), exchange=exchange)
        yield from _together(tellings, cell, place, is_told=is_told)
        yield replace(place, came_out=True)


def _together(
    tellings: Sequence[Read],
    cell: Sequence[int],
    place: Difference,
    *,
    is_told: bool = True,
) -> Iterator[Difference]:
    """Yield the place of each rank of a cell, or one of all if it is not known who had an effect
    on whom.
    """
    is_told = is_told and not _is_partial(tellings, cell)
    positions = [(position,) for position in cell] if is_told else [tuple(cell)]
    for first, *beside in positions:
        yield replace(place, position=first, beside=tuple(beside))


def _is_partial(tellings: Sequence[Read], cell: Sequence[int]) -> bool:
    return any(telling[position].account.is_partial for telling in tellings for position in cell)


def _exchanged(told: _Indexed, key: _Key) -> Exchanged:
    exchanged = told.exchanged.get(key)
    if exchanged is not None:
        return exchanged
    in_pass, micro_batch, visit = key
    return Exchanged(in_pass=in_pass, micro_batch=micro_batch, given=(), made=(), visit=visit)


def _first_of(one: Read, other: Read, width: int) -> Difference | None:
    for place in _places((one, other), width):
        if _values(one, place) != _values(other, place):
            return place
    return None


def _values(telling: Read, place: Difference) -> Values:
    return tuple(_value(telling[position], place) for position in place.positions)


def _value(told: _Indexed, place: Difference) -> tuple[str, ...]:
    if place.micro_batch is None:
        return told.account.weights
    key = place.in_pass, place.micro_batch, place.visit
    if place.exchange is not None:
        exchanged = _exchanged(told, key)
        digests = exchanged.made if place.came_out else exchanged.given
        return digests[place.exchange : place.exchange + 1]
    digest = told.sent.get(key)
    return () if digest is None else (digest,)


def _voices(
    told: Sequence[Told], values: Sequence[Values], place: Difference, devices: Devices
) -> list[tuple[frozenset[Slot], Values]]:
    """Return what devices said last at a place; those that have computed together say one thing."""
    voices: list[tuple[frozenset[Slot], frozenset[Slot], Values]] = []
    for one, value in zip(told, values, strict=True):
        slots = frozenset(one.cells[position] for position in place.positions)
        stands = [devices[p][one.cells[p]] for p in place.positions]
        if None in stands:
            continue
        known = frozenset(device for device in stands if device is not None)
        met = [voice for voice in voices if voice[0] & known]
        known = known.union(*(others for others, _, _ in met))
        slots = slots.union(*(others for _, others, _ in met))
        voices = [*(voice for voice in voices if voice not in met), (known, slots, value)]
    return [(slots, value) for _, slots, value in voices]


def _majority(values: Sequence[Values]) -> Values | None:
    """Return what more than half of the voices say, and two at least; None if there is nothing."""
    top, num_top = next(iter(Counter(values).most_common(1)), (None, 0))
    return top if num_top > 1 and 2 * num_top > len(values) else None


def _undecided(
    told: Sequence[Told],
    place: Difference,
    voices: Sequence[tuple[frozenset[Slot], Values]],
) -> Ruling:
    chains = ", ".join(str(replica) for replica in sorted({t.replica for t in told}))
    heard = [devices for devices, _ in voices]
    heard = heard or [frozenset(t.cells[p] for t in told for p in place.positions)]
    doubted = tuple(sorted({slot for devices in heard for slot in devices}))
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
