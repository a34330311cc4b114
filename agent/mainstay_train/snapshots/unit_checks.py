"""Compares the units that a replay has made with what votes told of each.

Votes tell one digest of a position's gradient and one of its masters. Those of its units add up to
them, and stores keep these (:mod:`mainstay_core.wire.unit_digests`). So what a replayed step makes
of the units whose state is there is compared at that step, while the others are frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from mainstay_core.base.digest import Digest, total
from mainstay_core.base.errors import MainstayError, brief
from mainstay_core.base.words import count
from mainstay_core.rank.replays.boundaries import BoundaryReplay
from mainstay_core.rank.replays.replaying import Replay
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind
from mainstay_core.wire.unit_digests import (
    MAX_DIGESTED_UNITS,
    UnitDigests,
    seal_digests,
    unpack,
    why_void,
)
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.compute.engine import Engine
from mainstay_train.exact.gradients import identity
from mainstay_train.exact.unit_sums import packed, units_of, whole_of
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.state.digest_client import DigestClient
from mainstay_train.state.store_connection import StoreGone
from mainstay_train.sums import digests

logger = logging.getLogger(__name__)


WRONG_APPLY = "how the step was applied may be what is wrong"
"""Why no copy is to blame."""


class Told(NamedTuple):
    """The digests of a position's units in one step, by number."""

    gradients: Sequence[Digest]
    masters: Sequence[Digest]
    """Before the step was applied."""


class Differing(NamedTuple):
    """A unit that a replay has made differently than votes told."""

    unit: int
    why: str


class UnitChecks(Protocol):
    """The comparisons of units that a replay has made with what votes told of them."""

    def is_known(self, record: CommitRecord | None) -> bool:
        """Return whether stores tell of the units in a step, so that votes vouch for it."""

    def differing_masters(
        self, record: CommitRecord | None, units: Iterable[int]
    ) -> list[Differing]:
        """Return the units whose masters are not those before a step; none if it is not known."""

    def differing_gradients(self, record: CommitRecord, units: Iterable[int]) -> list[Differing]:
        """Return those whose reduced gradient is not that of a step; none if it is not known."""

    def why_wrong(self, record: CommitRecord | None, key: SegmentKey) -> str:
        """Return why a segment that was read to its place is wrong as it was written.

        Empty if it is right, as far as votes tell: of moments, and of weights that are computed
        with in fewer bits than masters have, they tell nothing.
        """

    def prove(self, record: CommitRecord | None, key: SegmentKey) -> bool:
        """Return whether votes tell all of a segment in whose place nothing was found wrong."""


def digests_of_step(engine: Engine, record: CommitRecord, position: int) -> UnitDigests | None:
    """Return the digests of this rank's units in a step that it is about to apply.

    Args:
        engine: after its vote on the step, before it is applied.
        record: of the commit.
        position: of the engine.

    Returns:
        They are sealed. None if what is here is not what the votes told: the commit is of a step
        that this rank did not reduce.
    """
    if engine.read is None or position >= min(len(record.gradients), len(record.states)):
        return None
    gradients, masters = engine.read.unit_sums(), record.states[position]
    if whole_of(gradients).hex() != record.gradients[position]:
        return None
    shared = engine.shared(masters)
    if shared.by_unit is None or shared.whole.hex() != masters:
        return None
    if gradients.shape[1] > MAX_DIGESTED_UNITS:
        return None
    return seal_digests(
        UnitDigests(
            lineage=record.lineage,
            position=position,
            step=record.commit.step,
            gradients=packed(gradients),
            masters=packed(shared.by_unit),
        )
    )


def holders_of(replay: Replay | BoundaryReplay) -> tuple[Holder, ...]:
    """Return the pods that keep copies for a replay, each once: they keep digests of units, too."""
    found: list[Holder] = []
    if isinstance(replay, BoundaryReplay):
        for load in (*(load for step in replay.steps for load in step.loads), *replay.loads):
            found += load.holders
    else:
        for unit in replay.units:
            found += unit.state_holders
            for _, holders in unit.gradients:
                found += holders
    return tuple(dict.fromkeys(found))


class ToldUnits:
    """The digests of units that stores tell of a position's steps; each step is asked for once.

    Args:
        client: asks stores.
        position: that is made anew.
        holders: pods that may know of its units; this one may be among them.
        timeout_s: how long one of them may take.
        ended: returns why the quorum has ended; empty while it has not.
    """

    def __init__(
        self,
        client: DigestClient,
        position: int,
        holders: Sequence[Holder],
        timeout_s: float,
        ended: Callable[[], str],
    ) -> None:
        self._client, self._position = client, position
        self._left, self._timeout_s, self._ended = [*holders], timeout_s, ended
        self._known: dict[int, Told | None] = {}

    def find(self, record: CommitRecord, num_units: int) -> Told | None:
        """Return what votes told of a position's units in a step; None if no store knows."""
        step = record.commit.step
        if step not in self._known:
            self._known[step] = self._ask(record, num_units)
        return self._known[step]

    def _ask(self, record: CommitRecord, num_units: int) -> Told | None:
        lineage, step = record.lineage, record.commit.step
        try:
            here = self._client.find(lineage, self._position, step)
        except StoreGone:  # with its supervisor, and so this trainer ends too
            return None
        told = self._judge("this pod", here, record, num_units)
        for holder in tuple(self._left):
            if told is not None or self._ended():
                break
            told = self._ask_holder(holder, record, num_units)
        if told is None:
            logger.info("no store knows the units of position %d in step %d", self._position, step)
        return told

    def _ask_holder(self, holder: Holder, record: CommitRecord, num_units: int) -> Told | None:
        asked = record.lineage, self._position, record.commit.step
        try:
            found = self._client.find_at(holder.address, *asked, self._timeout_s)
        except (OSError, ValueError, OverflowError, MainstayError) as error:
            logger.info("%s does not tell of units: %s", holder.pod, brief(error))
            self._left.remove(holder)  # to ask for each step would take as long each time
            return None
        told = self._judge(holder.pod, found, record, num_units)
        if told is not None and found is not None:
            # The pod that tells most is asked first from now on, and this one knows as well.
            self._left.remove(holder)
            self._left.insert(0, holder)
            try:
                self._client.keep(found, ())
            except StoreGone as error:
                logger.info("%s", error)
        return told

    def _judge(
        self, pod: str, found: UnitDigests | None, record: CommitRecord, num_units: int
    ) -> Told | None:
        if found is None:
            return None
        why = why_void(found, record, self._position, num_units)
        if why:
            logger.warning(
                "the digests of the units of position %d in step %d, as %s tells them, count for "
                "nothing: %s", self._position, record.commit.step, pod, why
            )  # fmt: skip
            return None
        return Told(unpack(found.gradients), unpack(found.masters))


class StageChecks:
    """The comparisons of one replay's units.

    Args:
        engine: whose state is made.
        units: of this state.
        told: what stores tell.
    """

    def __init__(self, engine: Engine, units: UnitBytes, told: ToldUnits) -> None:
        self._engine, self._units, self._told = engine, units, told
        blocks, layout = engine.state.blocks, engine.state.layout
        inner = engine.inner
        place = f"@{inner.index}" if inner.size > 1 else ""
        self._runs: list[list[tuple[str, int, slice]]] = [[] for _ in units.names]
        """Of each unit its runs: identity in digests, first element in the block, place."""
        for block, at, runs in zip(blocks, layout.offsets, units_of(blocks).runs, strict=True):
            for start, stop, unit in runs:
                run = identity(block.layout, place), start, slice(at + start, at + stop)
                self._runs[unit].append(run)
        masters = {t.name: t for t in engine.state.state_tensors() if t.kind == "master"}
        self._masters = [[masters[name] for name in names] for names in units.parameters]
        self._computes_with_masters = {
            units.numbers[name]
            for block in blocks
            if block.compute is block.masters
            for name in block.units
        }

    def is_known(self, record: CommitRecord | None) -> bool:
        """Return whether stores tell of the units in a step, so that votes vouch for it."""
        return self._find(record) is not None

    def differing_masters(
        self, record: CommitRecord | None, units: Iterable[int]
    ) -> list[Differing]:
        """Return the units whose masters are not those before a step; none if it is not known."""
        told = self._find(record)
        if told is None:
            return []
        return self._compare("masters of unit {} have", told.masters, units, self._made)

    def differing_gradients(self, record: CommitRecord, units: Iterable[int]) -> list[Differing]:
        """Return those whose reduced gradient is not that of a step; none if it is not known."""
        told = self._find(record)
        if told is None:
            return []
        what = "reduced gradient of unit {} has"
        return self._compare(what, told.gradients, units, self._reduced)

    def why_wrong(self, record: CommitRecord | None, key: SegmentKey) -> str:
        """Return why a segment that was read to its place is wrong as it was written."""
        if record is None:
            return ""
        if key.kind is SegmentKind.GRADIENT:
            found = self.differing_gradients(record, (key.unit,))
        elif key.kind is SegmentKind.STATE or key.unit in self._computes_with_masters:
            found = self.differing_masters(record, (key.unit,))
        else:
            return ""
        return f"is wrong as it was written: {found[0].why}" if found else ""

    def prove(self, record: CommitRecord | None, key: SegmentKey) -> bool:
        """Return whether votes tell all of a segment in whose place nothing was found wrong."""
        if record is None or key.version != record.commit.step or not self.is_known(record):
            return False
        is_compute = key.kind is SegmentKind.COMPUTE
        return key.kind is SegmentKind.GRADIENT or (
            is_compute and key.unit in self._computes_with_masters
        )

    def _find(self, record: CommitRecord | None) -> Told | None:
        return None if record is None else self._told.find(record, len(self._units.names))

    def _compare(
        self,
        what: str,
        told: Sequence[Digest],
        units: Iterable[int],
        made: Callable[[int], Digest],
    ) -> list[Differing]:
        differing = []
        for unit in units:
            found = made(unit)
            if found != told[unit]:
                named = what.format(self._units.names[unit])
                why = f"the {named} digest {found}, its votes told {told[unit]}"
                differing.append(Differing(unit, why))
        return differing

    def _reduced(self, unit: int) -> Digest:
        """Return the digest of a unit's part of the reduced gradient."""
        flat = self._engine.reducer.reduced
        return total(
            digests.tensor_digest(name, flat[place], start)
            for name, start, place in self._runs[unit]
        )

    def _made(self, unit: int) -> Digest:
        """Return the digest of a unit's masters."""
        return total(master.digest() for master in self._masters[unit])


def name_some(differing: Sequence[Differing]) -> str:
    """Say which units differ: the first, and how many more."""
    more = len(differing) - 1
    return differing[0].why + (f"; the same is said of {count(more, 'more unit')}" if more else "")
