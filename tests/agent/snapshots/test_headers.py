"""A bit flips in what a store says of a segment: no state that was made of it ever counts.

Replays read from real stores. Between two of them the members exchange what stores hold and what
was found damaged, as in a settle; where nothing can be made anew any more, the next row is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.agent.snapshots.conftest import Pod, done_check
from tests.core.segments.keys import header_of, key_of
from tests.train.snapshots.test_replayer import NUM_UNITS, TOLD, Stage, content, expected, record

from mainstay_agent.snapshots.check import SegmentCheck
from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid
from mainstay_core.rank.events import StateLoaded
from mainstay_core.rank.replays.replaying import Stores
from mainstay_core.segments.index import SegmentIndex
from mainstay_core.segments.kept import Segment
from mainstay_core.segments.spans import PAGE_BYTES
from mainstay_core.segments.status import Checksums
from mainstay_core.snapshots.checks import judge
from mainstay_core.wire.segments import BadSegment, StoreReport, seal
from mainstay_core.wire.stores import StoreCheck
from mainstay_train.snapshots.good_copies import GoodCopies
from mainstay_train.snapshots.replayer import Replayer
from mainstay_train.state.segments import SegmentClient

STATE, VERSION = 4, 6
UNIT = 1
"""Whose segments are damaged."""
MAX_ROUNDS = 9


def fill(client: SegmentClient) -> None:
    """Keep two windows of one version each, and what leads on from the older one."""
    keys = [key_of(version, n) for version in (STATE, STATE + 1) for n in range(NUM_UNITS)]
    keys += [key_of(s, n, "gradient") for s in range(STATE, VERSION) for n in range(NUM_UNITS)]
    for key in keys:
        data = content(key)
        room = client.room(len(data))
        room.memory[:] = data
        header = header_of(key, len(data), num_units=NUM_UNITS, digest=seal(key, data.hex()))
        client.written(room, header, [], 0)
    for step in range(STATE, VERSION + 1):
        client.record(record(step))
    assert client.wait_held(keys) == ""


def index_of(pod: Pod) -> SegmentIndex:
    return cast(SegmentIndex, pod.store._index)


def find(index: SegmentIndex, kind: str, version: int) -> Segment:
    segment = index.find(key_of(version, UNIT, kind))
    assert segment is not None
    return segment


def rename(segment: Segment, bit: int) -> None:
    """Flip a bit of the version in the key itself, by which the store finds the segment."""
    object.__setattr__(segment.header.key, "version", segment.header.key.version ^ bit)


def retell(segment: Segment, **changes: Any) -> None:
    """Change the header that the store gives to readers."""
    segment.header = replace(segment.header, **changes)


def retell_version(segment: Segment) -> None:
    key = segment.header.key
    retell(segment, key=replace(key, version=key.version ^ 8))


def retell_digest(segment: Segment) -> None:
    first, rest = segment.header.digest[0], segment.header.digest[1:]
    retell(segment, digest=f"{int(first, 16) ^ 1:x}{rest}")


def misplace(index: SegmentIndex, kind: str) -> None:
    """Have what is of one version lie where the next one belongs, as if it had been written so."""
    older, newer = find(index, kind, STATE), find(index, kind, STATE + 1)
    newer.header, newer.span = replace(older.header, key=newer.header.key), older.span


def misrecord(index: SegmentIndex, **changes: Any) -> None:
    """Change what the store keeps of the commit of the step that is applied again."""
    kept = next(r for r in index.records if r.commit.step == STATE + 1)
    commit = {name: changes.pop(name) for name in ("step", "scale") if name in changes}
    step, commit_of = kept.commit.step, replace(kept.commit, **commit)
    records = index.commits
    _, size = records._records[step]
    records._records[step] = replace(kept, commit=commit_of, **changes), size


WRONG = ("f" * 32,)
RECORD_FLIPS: dict[str, dict[str, Any]] = {
    "the scale": {"scale": 2.0},
    "the step": {"step": STATE},
    "the digest of the state": {"states": WRONG},
    "the digest of the gradient": {"gradients": WRONG},
    "the quorum": {"certified_in": "q9-abc"},
    "the lineage": {"lineage": 1},
    "the chain": {"chain": "d"},
    "the seal": {"seal": "e" * 32},
}


FLIPS: dict[str, Callable[[SegmentIndex, str], None]] = {
    "the version by which it is found": lambda i, k: rename(find(i, k, STATE + 1), 1),
    "a high bit of that": lambda i, k: rename(find(i, k, STATE + 1), 64),
    "the version that readers see": lambda i, k: retell_version(find(i, k, STATE + 1)),
    "the nonce": lambda i, k: retell(find(i, k, STATE + 1), nonce="abb"),
    "the digest": lambda i, k: retell_digest(find(i, k, STATE + 1)),
    "the version as it was written": misplace,
}


class Lost:
    """A trainer that makes a lost state anew, until it can or nothing can be made anew."""

    def __init__(self, client: SegmentClient, pods: Sequence[Pod]) -> None:
        self.stage = Stage()
        self._client, self._pods = client, pods
        self.bad: list[BadSegment] = []
        self.num_rounds = 0

    def reports(self) -> list[StoreReport]:
        told = [self._client.report_of(p.holder.address, 0, 5.0) for p in self._pods]
        return [*told, StoreReport(pod=PodUid("own"), address="", lineage=0, bad=(*self.bad,))]

    def run(self) -> bool:
        """Return whether the state was made anew; else its position does not reach the version."""
        for self.num_rounds in range(1, MAX_ROUNDS):
            stores = Stores(self.reports(), 0)
            replay = stores.plan_replay(0, VERSION) if VERSION in stores.reach(0) else None
            if replay is None:
                return False
            copies = GoodCopies(self._client, PodUid("own"), lambda: "")
            stage = cast(Any, self.stage)
            outcome = Replayer(stage, stage, copies, lambda _: 0.1, lineage=0, position=0).run(
                replay, TOLD
            )
            if isinstance(outcome, StateLoaded):
                return True
            self.bad += copies.bad
        raise AssertionError("it is tried again and again")


@pytest.fixture
def lost(
    make_store: Callable[..., Pod], make_client: Callable[..., SegmentClient]
) -> Callable[[int], tuple[Lost, list[Pod]]]:
    def make(num_copies: int) -> tuple[Lost, list[Pod]]:
        pods = [make_store(name) for name in ("a", "b")[:num_copies]]
        for pod in pods:
            fill(make_client(pod))
        return Lost(make_client(make_store("own")), pods), pods

    return make


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("kind", ["state", "gradient"])
@pytest.mark.parametrize("what", FLIPS)
def test_a_flipped_header_is_found_before_a_state_counts(
    lost: Callable[[int], tuple[Lost, list[Pod]]], what: str, kind: str, num_copies: int
) -> None:
    loser, pods = lost(num_copies)
    FLIPS[what](index_of(pods[0]), kind)

    made = loser.run()

    if made:
        assert loser.stage.states == expected(VERSION)
    # Of a state an older one is left, and the gradients since; of a gradient the other pod's copy.
    assert made is (num_copies == 2 or kind == "state" or what == "the nonce")
    # Nobody has to take good copies for bad ones: it is known which one is wrong.
    assert {bad.key.unit for bad in loser.bad} <= {UNIT}
    assert {bad.pod for bad in loser.bad} <= {"a"}


def misplace_unit(index: SegmentIndex, bit: int = 64) -> None:
    """Flip a high bit of the unit's number, by which all of its segments are told."""
    kept = index._units
    kept[0, UNIT ^ bit] = kept.pop((0, UNIT))


UNIT_FLIPS: dict[str, Callable[[SegmentIndex], None]] = {
    "how many units there are": lambda i: setattr(i._units[0, UNIT], "num_units", NUM_UNITS ^ 4),
    "that there are any": lambda i: setattr(i._units[0, UNIT], "num_units", 0),
    "the unit": misplace_unit,
    "the unit, beyond what a message carries": lambda i: misplace_unit(i, 1 << 40),
}


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("what", UNIT_FLIPS)
def test_of_a_unit_whose_place_flips_the_good_copies_are_used(
    lost: Callable[[int], tuple[Lost, list[Pod]]], what: str, num_copies: int
) -> None:
    loser, pods = lost(num_copies)
    UNIT_FLIPS[what](index_of(pods[0]))

    made = loser.run()

    assert made is (num_copies == 2)
    assert not loser.bad, "of what is told wrong nothing is read"
    if made:
        assert loser.stage.states == expected(VERSION)


@pytest.mark.parametrize("kind", ["state", "gradient"])
@pytest.mark.parametrize(
    "what",
    ["the version by which it is found", "a high bit of that", "the version that readers see"],
)
def test_a_check_names_a_segment_that_no_key_finds_and_its_room_is_free_again(
    lost: Callable[[int], tuple[Lost, list[Pod]]], what: str, kind: str
) -> None:
    _, pods = lost(2)
    index = index_of(pods[0])
    kept, free = len(index.segments()), index.free_bytes
    segment = find(index, kind, STATE + 1)
    FLIPS[what](index, kind)

    verdict = judge({pod.uid: done_check(pod, 1) for pod in pods})

    (named,) = verdict.lost
    assert (named.pod, named.unit_name, named.key.unit) == ("a", f"layer.{UNIT}", UNIT)
    assert verdict.damaged == (), "a good copy may have the key that is found"
    assert segment not in index.segments()
    assert len(index.segments()) == kept - 1
    assert index.free_bytes == free + PAGE_BYTES
    told = pods[0].store.ask().result()
    assert (told.num_discarded, told.num_damaged) == (1, 0)
    assert judge({pod.uid: done_check(pod, 2) for pod in pods}).lost == ()


@pytest.mark.parametrize("name", ["lineage", "position", "unit", "version", "shard_type"])
def test_a_lost_key_that_no_message_carries_is_told_within_its_bounds(
    lost: Callable[[int], tuple[Lost, list[Pod]]], name: str
) -> None:
    _, pods = lost(1)
    key = find(index_of(pods[0]), "state", STATE + 1).header.key
    object.__setattr__(key, name, getattr(key, name) ^ (1 << 60))

    check = done_check(pods[0], 1)

    assert len(check.lost) == 1
    assert codec.decode(StoreCheck, codec.encode(check)) == check


def test_a_check_tells_what_one_that_it_replaces_has_dropped(
    lost: Callable[[int], tuple[Lost, list[Pod]]],
) -> None:
    _, pods = lost(1)
    index, sums = index_of(pods[0]), Checksums()
    rename(find(index, "state", STATE + 1), 64)
    first = SegmentCheck(1, index, pods[0].store._arena, sums)

    second = SegmentCheck(2, index, pods[0].store._arena, sums, first.lost)

    assert len(first.lost) == 1
    assert second.lost == first.lost


@pytest.mark.parametrize("num_copies", [1, 2])
@pytest.mark.parametrize("what", RECORD_FLIPS)
def test_a_flipped_record_of_a_commit_is_found_before_a_state_counts(
    lost: Callable[[int], tuple[Lost, list[Pod]]], what: str, num_copies: int
) -> None:
    loser, pods = lost(num_copies)
    misrecord(index_of(pods[0]), **RECORD_FLIPS[what])

    made = loser.run()

    # The record of the other pod is used, at once; without one the next row is taken.
    assert made is (num_copies == 2)
    assert loser.num_rounds == 1
    assert not loser.bad, "no segment is to blame"
    if made:
        assert loser.stage.states == expected(VERSION)
    assert "on a is damaged" in Stores(loser.reports(), 0).bad_records
    told = pods[0].store.ask().result()
    assert (told.num_discarded, told.num_damaged) == (1, 1)
    assert [(run.first, run.last) for run in told.judged] == [(4, 4), (6, 6)]
