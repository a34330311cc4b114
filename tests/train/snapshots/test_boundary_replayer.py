"""A boundary replay compares what it reads with headers, and what comes out with votes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.train.checks.wrong_once import WrongOnce
from tests.train.snapshots.trained_chain import (
    LENGTH,
    RATE,
    STEPS,
    Trained,
    make_engine,
    train,
)

from mainstay_core.base.ids import PodUid
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.settings import Mode
from mainstay_core.rank.events import LoadFailed, StateLoaded
from mainstay_core.rank.replays.boundaries import BoundaryReplay, BoundaryStep, Relay, UnitLoad
from mainstay_core.snapshots.stretches import Stretch
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind, boundary_key, seal
from mainstay_core.wire.unit_digests import UnitDigests
from mainstay_core.wire.votes import CommitRecord
from mainstay_train.checks.checker import Checks
from mainstay_train.snapshots import boundary_replayer
from mainstay_train.snapshots.boundary_replayer import BoundaryReplayer
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.sent_log import SentLogs, flow_digest
from mainstay_train.snapshots.unit_bytes import UnitBytes
from mainstay_train.snapshots.unit_checks import StageChecks, ToldUnits
from mainstay_train.state.rooms import StoreFull
from mainstay_train.state.segments import Fetched, SegmentMissing

STAGE = 1
_BYTES = torch.uint8
HOLDERS = tuple(Holder(pod=PodUid(pod), address=f"{pod}:1") for pod in ("near", "far"))


class Shelf:
    """All segments that a replay reads, with their digests; each is at two pods."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, SegmentKey], bytes] = {}
        self.digests: dict[SegmentKey, str] = {}
        self.written: set[SegmentKey] = set()
        self.voted: list[Any] = []
        self.is_full = False
        self.num_interrupts = 0
        """Each breaks what is being read."""
        self.doubted: list[str] = []
        self.resealed: dict[tuple[str, SegmentKey], str] = {}
        """Digests of copies that were written wrong, each with that of its bytes."""
        self._changed = threading.Condition()

    def put(self, key: SegmentKey, data: bytes, digest: str) -> None:
        self.kept |= {(holder.pod, key): data for holder in HOLDERS}
        self.digests[key] = digest

    def damage(self, key: SegmentKey, *pods: str) -> None:
        for pod in pods:
            data = bytearray(self.kept[pod, key])
            data[5] ^= 1
            self.kept[pod, key] = bytes(data)

    def write_wrong(
        self,
        key: SegmentKey,
        digest: Callable[[memoryview], str],
        *pods: str,
        byte: int = 5,
        bit: int = 0,
    ) -> None:
        """Put a wrong bit into copies, which have the digest of what they hold then."""
        for pod in pods:
            data = bytearray(self.kept[pod, key])
            data[byte] ^= 1 << bit
            self.kept[pod, key] = bytes(data)
            self.resealed[pod, key] = digest(memoryview(data))

    # The store's client

    def fetch(
        self, key: SegmentKey, holders: Sequence[Holder], memory: memoryview, *, own: bool = False
    ) -> Fetched:
        assert not own, "no holder is this pod"
        if not holders:
            raise SegmentMissing(f"nobody has the {key}")
        memory.cast("B")[:] = self.kept[holders[0].pod, key]
        digest = self.resealed.get((holders[0].pod, key), self.digests[key])
        return Fetched(cast(Any, SimpleNamespace(digest=digest)), holders[0])

    def fetch_awaited(
        self, key: SegmentKey, nonce: str, holder: Holder, memory: memoryview, ended: Any
    ) -> Any:
        """Wait for a neighbour that waits for what the full store has not kept."""
        assert nonce == "abc"
        if not self.is_full:
            return self.fetch(key, [holder], memory).header
        with self._changed:
            self._changed.wait_for(ended)
        raise SegmentMissing(ended())

    def doubt(self, holder: Holder, header: Any) -> bool:
        assert header.digest
        self.doubted.append(holder.pod)
        return True

    def interrupt(self) -> None:
        self.num_interrupts += 1
        with self._changed:
            self._changed.notify_all()

    def voted_logs(self, voted: Any) -> str:
        self.voted.append(voted)
        return ""

    def withdraw(self, key: SegmentKey) -> None:
        self.written.discard(key)

    # The writer

    def write(
        self, place: Any, key: SegmentKey, content: Any, holders: Any, *, may_evict: bool
    ) -> float:
        assert not may_evict, "others may read what would go"
        assert (place.position, holders) == (STAGE, ())
        if self.is_full:
            raise StoreFull("no room")
        memory = memoryview(bytearray(content.size_bytes))
        content.write(memory)
        assert content.digest(memory)
        self.written.add(key)
        return 0.0


class Knows:
    """The stores that tell of a stage's units: this pod's, and those of holders."""

    def __init__(self, told: Sequence[UnitDigests]) -> None:
        self.here: dict[int, UnitDigests] = {}
        self.there = {holder.address: {t.step: t for t in told} for holder in HOLDERS}
        self.asked: list[tuple[str, int]] = []
        self.silent: set[str] = set()

    def find(self, lineage: int, position: int, step: int) -> UnitDigests | None:
        assert (lineage, position) == (0, STAGE)
        return self.here.get(step)

    def find_at(
        self, address: str, lineage: int, position: int, step: int, timeout_s: float
    ) -> UnitDigests | None:
        assert (lineage, position, timeout_s) == (0, STAGE, 5.0)
        self.asked.append((address, step))
        if address in self.silent:
            raise ConnectionRefusedError(address)
        return self.there[address].get(step)

    def keep(self, told: UnitDigests, holders: Sequence[Holder]) -> None:
        assert holders == ()
        self.here[told.step] = told


class Case:
    """A middle stage that is lost, and what is kept of it."""

    def __init__(self, trained: Trained, model: str = "moe", dtype: str = "bfloat16") -> None:
        self.trained, self.shelf = trained, Shelf()
        self.engine = make_engine(model, dtype, STAGE)
        self.knows = Knows(trained.told[STAGE])
        self.engine.state.initialize(8)  # what is not loaded is wrong
        reduced = self.engine.reducer.reduced
        self.units = UnitBytes(self.engine.state, reduced)
        self.copies = GoodCopies(cast(Any, self.shelf), PodUid("own"), lambda: "")
        self.first_input = boundary_key(0, STAGE - 1, SegmentKind.ACTIVATION, 0, 0, 0)

    def load(self, number: int, kind: SegmentKind, version: int) -> UnitLoad:
        key = SegmentKey(lineage=0, position=STAGE, unit=number, kind=kind, version=version)
        data = self.trained.copies[STAGE][version][kind][number]
        digest = self.units.digest(number, kind, memoryview(data))
        self.shelf.put(key, bytes(data), seal(key, digest))
        return UnitLoad(name=self.units.names[number], key=key, holders=HOLDERS)

    def loads(self, version: int) -> tuple[UnitLoad, ...]:
        found = []
        for number in range(len(self.units.names)):
            turn = number % LENGTH
            if turn == version:
                found.append(self.load(number, SegmentKind.STATE, version))
            elif turn > version:
                found.append(self.load(number, SegmentKind.COMPUTE, version))
        return tuple(found)

    def inputs(self, step: int) -> tuple[tuple[SegmentKey, tuple[Holder, ...]], ...]:
        found = []
        senders = (
            (STAGE - 1, "F", SegmentKind.ACTIVATION),
            (STAGE + 1, "B", SegmentKind.INPUT_GRADIENT),
        )
        for sender, direction, kind in senders:
            for (at, way, shard_type, number), tensor in self.trained.logs[sender].kept.items():
                if (at, way) == (step, direction):
                    key = boundary_key(0, sender, kind, step, shard_type, number)
                    data = tensor.contiguous().view(-1).view(dtype=_BYTES).numpy()
                    self.shelf.put(key, data.tobytes(), flow_digest(key, tensor))
                    found.append((key, HOLDERS))
        return tuple(found)

    def record(self, step: int) -> CommitRecord:
        return self.trained.record(STAGE, step)

    def told(self) -> StageChecks:
        """What compares units, with what the stores tell."""
        client = cast(Any, self.knows)
        return StageChecks(
            self.engine, self.units, ToldUnits(client, STAGE, HOLDERS, 5.0, lambda: "")
        )

    def digest(self, key: SegmentKey) -> Callable[[memoryview], str]:
        """What computes the digest of a unit's segment."""
        return lambda memory: seal(key, self.units.digest(key.unit, key.kind, memory))

    def replay(self) -> BoundaryReplay:
        numbers = range(len(self.units.names))
        return BoundaryReplay(
            position=STAGE,
            version=STEPS,
            stretch=Stretch(first=STAGE, last=STAGE),
            window=Window(first=0, length=LENGTH),
            steps=tuple(
                BoundaryStep(
                    record=self.record(step),
                    loads=self.loads(step),
                    frozen=tuple(n for n in numbers if n % LENGTH > step),
                    skipped=tuple(n for n in numbers if n % LENGTH > step),
                    inputs=self.inputs(step),
                )
                for step in range(STEPS)
            ),
            next=self.record(STEPS),
        )

    def run(self, replay: BoundaryReplay) -> StateLoaded | LoadFailed:
        replayer = BoundaryReplayer(self.engine, self.units, self.copies, lambda _: RATE)
        quorum = SimpleNamespace(nonce="abc")
        place = SimpleNamespace(
            plan=SimpleNamespace(quorum=quorum), index=STAGE, lineage=0, position=STAGE
        )
        logs = SentLogs(cast(Any, self.shelf), cast(Any, self.shelf))
        return replayer.run(replay, logs, cast(Any, place), self.told())


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train("moe", "bfloat16")


@pytest.fixture
def case(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(boundary_replayer, "logged_again", lambda *_: (1, 3))
    return Case(trained)


def test_a_wrong_bit_in_the_cast_of_states_that_were_read_is_repaired(
    case: Case,
) -> None:
    findings: list[Finding] = []
    case.engine.checks = Checks(Mode.FULL, tell=findings.append)

    with WrongOnce("aten.copy_", dtype=torch.bfloat16) as wrong:
        assert isinstance(case.run(case.replay()), StateLoaded)

    assert wrong.was_wrong
    assert len(findings) == 1


def test_a_replay_ends_with_the_masters_and_tells_the_steps_that_it_knows(case: Case) -> None:
    outcome = case.run(case.replay())

    assert isinstance(outcome, StateLoaded)
    assert outcome.digest == case.trained.digests[STAGE][STEPS][1]
    told = [(step.commit.step, step.gradient) for step in outcome.replayed]
    first = LENGTH - 2  # after it all units are active
    assert told == [(s, case.trained.digests[STAGE][s][0]) for s in range(first, STEPS)]
    assert {key.shard_type for key in case.shelf.written} == {1, 3}
    assert len(case.shelf.written) == STEPS * 2 * 2 * 2  # both kinds, types, micro-batches
    assert [(v.step, v.quorum, v.types) for v in case.shelf.voted] == [
        (step, "q1-abc", (1, 3)) for step in range(STEPS)
    ]


def test_a_damaged_log_is_named_and_the_next_copy_is_used(case: Case) -> None:
    replay = case.replay()
    case.shelf.damage(case.first_input, "near")

    assert isinstance(case.run(replay), StateLoaded)
    assert [(bad.key, bad.pod) for bad in case.copies.bad] == [(case.first_input, "near")]
    assert case.shelf.doubted == ["near"]


def test_without_a_good_copy_of_a_log_the_replay_fails_and_names_it(case: Case) -> None:
    replay = case.replay()
    case.shelf.damage(case.first_input, "near", "far")

    outcome = case.run(replay)

    assert isinstance(outcome, LoadFailed)
    assert f"the copy of {case.first_input} on near" in outcome.why
    assert f"nobody has the {case.first_input}" in outcome.why


def test_of_a_type_of_which_too_few_micro_batches_are_told_no_log_counts(case: Case) -> None:
    """Its sender's store has a wrong number of them, so that the last one seems not to be there."""
    replay = case.replay()
    first, *others = replay.steps
    lacking = replace(case.first_input, micro_batch=1)
    told = tuple((key, holders) for key, holders in first.inputs if key != lacking)
    assert len(told) == len(first.inputs) - 1

    outcome = case.run(replace(replay, steps=(replace(first, inputs=told), *others)))

    assert isinstance(outcome, LoadFailed)
    assert f"near, far told of the {case.first_input}, but not of the {lacking}" in outcome.why
    assert [(b.key, b.pod) for b in case.copies.bad] == [
        (case.first_input, pod) for pod in ("near", "far")
    ]


def test_a_log_that_was_written_wrong_is_found_by_what_votes_told(case: Case) -> None:
    replay = case.replay()
    case.shelf.damage(case.first_input, "near", "far")
    data = case.shelf.kept["near", case.first_input]
    tensor = case.trained.logs[STAGE - 1].kept[0, "F", 0, 0]
    wrong = tensor.new_empty(tensor.shape)
    wrong.view(-1).view(dtype=_BYTES).numpy()[:] = bytearray(data)
    case.shelf.digests[case.first_input] = flow_digest(case.first_input, wrong)

    outcome = case.run(replay)

    assert isinstance(outcome, LoadFailed)
    assert "its votes told" in outcome.why
    assert case.first_input in {bad.key for bad in case.copies.bad}


def test_after_a_step_that_came_out_right_only_what_came_since_is_blamed(case: Case) -> None:
    replay = case.replay()
    assert replay.next is not None
    wrong = replace(replay, next=replace(replay.next, states=("", "another", "")))

    outcome = case.run(wrong)

    assert isinstance(outcome, LoadFailed)
    assert "its votes told another" in outcome.why
    assert case.copies.bad == [], "all states, and the gradient of the last step, were as told"


def in_a_stretch(replay: BoundaryReplay) -> BoundaryReplay:
    """The stage after it is lost as well, and replays."""
    relay = Relay(position=STAGE + 1, kind=SegmentKind.INPUT_GRADIENT, holders=(HOLDERS[0],) * 4)
    return replace(replay, relays=(relay,))


def test_in_a_stretch_a_neighbour_is_read_as_soon_as_it_has_sent(case: Case) -> None:
    assert isinstance(case.run(in_a_stretch(case.replay())), StateLoaded)


def test_in_a_stretch_a_full_store_ends_the_replay_for_which_neighbours_wait(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary_replayer, "logged_again", lambda *_: range(4))
    replay = in_a_stretch(case.replay())
    case.shelf.is_full = True

    outcome = case.run(replay)

    assert outcome == LoadFailed("no room")


def test_a_full_store_leaves_a_replay_without_neighbours_as_it_is(case: Case) -> None:
    replay = case.replay()
    case.shelf.is_full = True

    assert isinstance(case.run(replay), StateLoaded)
    assert case.shelf.voted == []
    assert case.shelf.num_interrupts == 1, "reading ends with the replay, and not before"


def test_a_replay_that_nothing_can_judge_fails(case: Case) -> None:
    replay = case.replay()
    unjudged = BoundaryReplay(
        position=STAGE,
        version=1,
        stretch=replay.stretch,
        window=replay.window,
        steps=replay.steps[:1],
    )

    outcome = case.run(unjudged)

    assert isinstance(outcome, LoadFailed)
    assert "nothing can be compared" in outcome.why
