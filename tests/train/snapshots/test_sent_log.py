"""What a stage sends is logged beside the step, and counts once its type is complete."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mainstay_core.planning.program import Action, Op
from mainstay_core.segments.frames import VotedLogs
from mainstay_core.wire.segments import SegmentKey, SegmentKind, boundary_key
from mainstay_train.comm.chains import Mark
from mainstay_train.snapshots.sent_log import SentLogs, flow_digest, kinds_of
from mainstay_train.snapshots.writer import Content
from mainstay_train.state.rooms import StoreFull

STAGE, STEP, LINEAGE = 1, 5, 2
PLACE = cast(Any, SimpleNamespace(lineage=LINEAGE, position=STAGE))
QUORUM = "q7-abc"


@dataclass
class Store:
    """Writer and client of a pod's store in one."""

    room: int = 100
    bytes: dict[SegmentKey, bytearray] = field(default_factory=dict)
    digests: dict[SegmentKey, str] = field(default_factory=dict)
    voted: list[VotedLogs] = field(default_factory=list)

    def write(self, place: Any, key: SegmentKey, content: Content, holders: Any, **_: Any) -> float:
        assert (place, holders) == (PLACE, ())
        if len(self.bytes) == self.room:
            raise StoreFull("no room")
        memory = bytearray(content.size_bytes)
        content.write(memoryview(memory))
        self.bytes[key], self.digests[key] = memory, content.digest(memoryview(memory))
        return 0.0

    def withdraw(self, key: SegmentKey) -> None:
        self.bytes.pop(key, None)

    def voted_logs(self, voted: VotedLogs) -> str:
        self.voted.append(voted)
        return ""


class Over:
    """A moment that is over."""

    def is_over(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass


def logs_of(store: Store) -> SentLogs:
    return SentLogs(cast(Any, store), cast(Any, store))


def settle(logs: SentLogs, types: tuple[int, ...] = (0,)) -> str:
    return logs.settle(PLACE, STEP, QUORUM, kinds_of(STAGE, 3), types, 1)


def send(log: Any, shard_type: int, value: float = 1.0) -> torch.Tensor:
    tensor = torch.full((1, 4, 2), value)
    log.sent(Action(Op.SEND_F, STAGE, shard_type, 0), tensor)
    return tensor


def key_of(shard_type: int) -> SegmentKey:
    return boundary_key(LINEAGE, STAGE, SegmentKind.ACTIVATION, STEP, shard_type, 0)


def test_what_is_sent_of_a_complete_type_is_kept_with_its_digest() -> None:
    store = Store()
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    tensor = send(log, 0)
    log.sent(Action(Op.SEND_B, STAGE, 0, 0), tensor)
    log.completed(0, None)
    send(log, 1)  # the chain ends before it is complete

    assert settle(logs) == ""

    back = boundary_key(LINEAGE, STAGE, SegmentKind.INPUT_GRADIENT, STEP, 0, 0)
    assert set(store.bytes) == {key_of(0), back}
    assert bytes(store.bytes[key_of(0)]) == tensor.numpy().tobytes()
    assert store.digests[key_of(0)] == flow_digest(key_of(0), tensor)
    assert store.digests[back] != store.digests[key_of(0)]
    (voted,) = store.voted
    assert voted.quorum == QUORUM
    assert voted.kinds == (SegmentKind.ACTIVATION, SegmentKind.INPUT_GRADIENT)


def test_what_the_device_had_not_computed_when_the_chain_ended_is_not_kept() -> None:
    store = Store()
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    for shard_type, counts in ((0, False), (1, None), (2, True)):
        send(log, shard_type)
        log.completed(shard_type, Mark(Over(), counts))

    assert settle(logs) == ""
    assert set(store.bytes) == {key_of(1), key_of(2)}


def test_a_full_store_stops_no_step_and_is_said_at_its_vote() -> None:
    store = Store(room=1)
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    for shard_type in (0, 1):
        send(log, shard_type)
        log.completed(shard_type, None)

    assert settle(logs, (0, 1)) == "no room"
    assert store.voted == []
    logs.of_step(PLACE, STEP + 1)
    assert settle(logs, (0,)) == ""


def test_a_replay_keeps_each_tensor_at_once_and_only_of_its_types() -> None:
    store = Store()
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP, at_once=(1,))
    send(log, 0)
    send(log, 1)

    assert settle(logs, (1,)) == ""
    assert set(store.bytes) == {key_of(1)}


@pytest.mark.parametrize(
    ("stage", "num_kinds"),
    [(0, {1: 0, 3: 1}), (1, {3: 2}), (2, {3: 1})],
)
def test_nothing_crosses_the_ends_of_the_pipeline(stage: int, num_kinds: dict[int, int]) -> None:
    for num_stages, number in num_kinds.items():
        kinds = kinds_of(stage, num_stages)
        assert len(kinds) == number
        assert (SegmentKind.ACTIVATION in kinds) == (stage < num_stages - 1)
        assert (SegmentKind.INPUT_GRADIENT in kinds) == (stage > 0)


def test_what_a_full_store_has_of_an_earlier_attempt_counts_no_more() -> None:
    store = Store(room=2)
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    for shard_type in (0, 1):
        send(log, shard_type)
        log.completed(shard_type, None)
    assert settle(logs, (0, 1)) == ""

    # The step was refused. It is computed again with other bits, and the store has no room.
    log = logs.of_step(PLACE, STEP)
    for shard_type in (0, 1):
        send(log, shard_type, 2.0)
        log.completed(shard_type, None)
    assert settle(logs, (0, 1)) == "no room"

    # Its votes did not come together either, but its types stay: they are not computed again.
    logs.of_step(PLACE, STEP)
    assert settle(logs, (0, 1)) == ""
    assert store.bytes == {}, "so the store says that what this vote rests on is lacking"


def test_a_vote_rests_no_more_on_logs_of_types_that_their_sender_has_dropped() -> None:
    """Another chain may compute them in the same quorum, and log them elsewhere."""
    store = Store()
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    for shard_type in (0, 1):
        send(log, shard_type)
        log.completed(shard_type, None)
    assert settle(logs, (0, 1)) == ""

    logs.withdraw(PLACE, STEP, kinds_of(STAGE, 3), (0,), 1)

    assert set(store.bytes) == {key_of(1)}


def test_tensors_of_one_step_at_most_wait_for_a_slow_store() -> None:
    class Slow(Store):
        def __init__(self) -> None:
            super().__init__()
            self.writing, self.goes_on = threading.Event(), threading.Event()

        def write(
            self, place: Any, key: SegmentKey, content: Content, holders: Any, **_: Any
        ) -> float:
            self.writing.set()
            self.goes_on.wait()
            return super().write(place, key, content, holders)

    store = Slow()
    logs = logs_of(store)
    log = logs.of_step(PLACE, STEP)
    for shard_type in range(3):
        send(log, shard_type)
        log.completed(shard_type, None)
    store.writing.wait()
    assert store.bytes == {}, "nothing of a step waits for its log"
    opens = threading.Timer(0.05, store.goes_on.set)
    opens.start()

    logs.of_step(PLACE, STEP)

    assert len(store.bytes) == 3
    opens.join()
