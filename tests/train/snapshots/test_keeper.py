"""What a trainer's segments are copied from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.core.plans import make_plan
from torch import nn

from mainstay_core.base.ids import JobUid, PodUid, Slot
from mainstay_core.job.config import SnapshotConfig
from mainstay_core.planning.program import Op
from mainstay_core.rank.events import PlacedUnit, Snapshot
from mainstay_core.snapshots.windows import Window
from mainstay_core.wire.segments import BadSegment, SegmentHeader, SegmentKey, SegmentKind
from mainstay_train.exact import optimizer
from mainstay_train.model import blocks
from mainstay_train.snapshots.keeper import SegmentKeeper
from mainstay_train.snapshots.writer import UnitContent
from mainstay_train.state.rooms import StoreFull


def keeper_of(
    engine: Any, client: Any = None, hook: Callable[[Op], None] = lambda _: None
) -> SegmentKeeper:
    return SegmentKeeper(
        job=JobUid("job"),
        slot=Slot(pod=PodUid("pod"), index=0),
        config=SnapshotConfig(memory_bytes=1 << 20),
        client=cast(Any, client),
        engine=lambda: engine,
        learning_rate=lambda _: 0.1,
        hook=lambda: hook,
    )


def test_a_gradient_is_copied_from_the_buffer_that_the_reducer_has_now() -> None:
    """A reduction that broke leaves its buffer behind, and the next one has another."""
    spec = blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50))
    state = optimizer.StageState([blocks.Block(spec)], optimizer.adamw())
    engine = SimpleNamespace(
        state=state, reducer=SimpleNamespace(reduced=torch.zeros(state.layout.size))
    )
    keeper = keeper_of(engine)
    before = keeper._units()
    assert keeper._units() is before

    engine.reducer.reduced = torch.full((state.layout.size,), 3.0)
    units = keeper._units()
    memory = memoryview(bytearray(units.size_bytes(0, SegmentKind.GRADIENT)))
    units.write(0, SegmentKind.GRADIENT, memory)

    assert set(torch.frombuffer(memory, dtype=torch.float32).tolist()) == {3.0}


def test_what_an_unfinished_replay_has_made_is_void_once_something_else_writes_the_state() -> None:
    keeper = keeper_of(None, SimpleNamespace(keep_from=lambda *_, **__: None))
    left, following = cast(Any, object()), make_plan({0: ["pod.1"]}, quorum=2)

    def is_left_after(what: Callable[[], None]) -> bool:
        keeper._unfinished.keep(make_plan({0: ["pod.1"]}), left)
        what()
        return keeper._unfinished.take(following) is left

    assert is_left_after(lambda: keeper.go_back(0, 4, drops_later=False))
    assert not is_left_after(lambda: keeper.go_back(0, 4, drops_later=True))
    assert not is_left_after(keeper.wait_copied)
    assert not is_left_after(keeper.forget_state)


def test_a_unit_comes_back_from_its_segment() -> None:
    spec = blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50))
    states = [optimizer.StageState([blocks.Block(spec)], optimizer.adamw()) for _ in range(2)]
    states[0].initialize(7)
    states[0].apply([torch.ones(states[0].layout.size)], 0.5, 0.1)
    written, read = (
        keeper_of(
            SimpleNamespace(
                state=state, reducer=SimpleNamespace(reduced=torch.zeros(state.layout.size))
            )
        )._units()
        for state in states
    )
    memory = memoryview(bytearray(written.size_bytes(0, SegmentKind.STATE)))

    written.write(0, SegmentKind.STATE, memory)
    read.read(0, SegmentKind.STATE, memory)

    for one, other in zip(states[0].flats(), states[1].flats(), strict=True):
        assert torch.equal(one.tensor, other.tensor)
    assert written.digest(0, SegmentKind.STATE, memory) == read.digest(0, SegmentKind.STATE, memory)
    memory[4] ^= 1
    assert written.digest(0, SegmentKind.STATE, memory) != read.digest(
        0, SegmentKind.STATE, memoryview(bytearray(len(memory)))
    )


class PlayedClient:
    """A store that takes everything, and remembers the headers."""

    def __init__(self) -> None:
        self.headers: list[SegmentHeader] = []
        self.note_held: Callable[[SegmentHeader], None] = lambda _: None

    def ask_room(self, size_bytes: int, window: int = 0) -> Any:
        del window
        return size_bytes

    def has_written(self, key: SegmentKey) -> bool:
        return key in {header.key for header in self.headers}

    def take_room(self, asked: Any) -> Any:
        return SimpleNamespace(memory=memoryview(bytearray(asked)))

    def written(self, room: Any, header: SegmentHeader, holders: Any, keep_from: int) -> None:
        del room, holders, keep_from
        self.headers.append(header)


def test_an_instalment_has_the_units_that_the_window_says_and_their_place_in_its_order() -> None:
    specs = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(30, 50)) for name in "abc"]
    state = optimizer.StageState([blocks.Block(spec) for spec in specs], optimizer.adamw())
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    client = PlayedClient()
    keeper = keeper_of(SimpleNamespace(state=state, reducer=reducer), client)
    window = Window(first=4, length=2)

    due = Snapshot(5, window, (PlacedUnit("c", 1), PlacedUnit("a", 2)))
    keeper.snapshot(make_plan({0: ["pod.1"]}), 0, 0, due)
    keeper.wait_copied()
    keeper._worker.end()

    told = [(h.unit_name, h.key.unit, h.key.version, h.place) for h in client.headers]
    assert told == [("c", 2, 5, 1), ("a", 0, 5, 2)]
    assert {(h.window, h.num_instalments) for h in client.headers} == {(4, 2)}


def test_an_instalment_is_held_once_all_holders_have_each_of_its_units() -> None:
    specs = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(30, 50)) for name in "abc"]
    state = optimizer.StageState([blocks.Block(spec) for spec in specs], optimizer.adamw())
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    client, ops = PlayedClient(), list[Op]()
    keeper = keeper_of(SimpleNamespace(state=state, reducer=reducer), client, ops.append)
    keeper.start({})
    window = Window(first=4, length=2)
    units = (PlacedUnit("c", 1), PlacedUnit("a", 2))
    for due in (Snapshot(4, window, units[:1]), Snapshot(5, window, units)):
        keeper.snapshot(make_plan({0: ["pod.1"]}), 0, 0, due)
    keeper._worker.wait_idle()
    assert ops == [Op.SNAPSHOT_COPIED] * 2

    before, first, second = client.headers
    gradient = replace(first, key=replace(first.key, kind=SegmentKind.GRADIENT))
    for header in (first, gradient, before):
        client.note_held(header)
    keeper._worker.wait_idle()
    assert ops[2:] == [Op.SNAPSHOT_HELD], "of the instalment before"
    client.note_held(second)
    client.note_held(second)
    keeper._worker.end()
    assert ops[2:] == [Op.SNAPSHOT_HELD] * 2


def test_an_instalment_is_not_held_by_what_a_quorum_before_has_copied_of_it() -> None:
    """A settle begins the window anew where it began, while the copies before are on their way."""
    state = optimizer.StageState(
        [blocks.Block(blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50)))],
        optimizer.adamw(),
    )
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    client, ops = PlayedClient(), list[Op]()
    keeper = keeper_of(SimpleNamespace(state=state, reducer=reducer), client, ops.append)
    keeper.start({})
    plan, due = (
        make_plan({0: ["pod.1"]}),
        Snapshot(4, Window(first=4, length=1), (PlacedUnit("a", 0),)),
    )
    again = replace(plan, quorum=replace(plan.quorum, id=plan.quorum.id + 1, nonce="again"))
    for of in (plan, again):
        keeper.snapshot(of, 0, 0, due)
    keeper._worker.wait_idle()
    before, after = client.headers
    assert before.key == after.key
    assert (before.quorum, after.quorum) == (plan.quorum.id, again.quorum.id)

    ops.clear()
    client.note_held(after)
    keeper._worker.wait_idle()
    assert ops == [Op.SNAPSHOT_HELD]
    ops.clear()
    keeper.snapshot(again, 0, 0, due)
    client.note_held(before)
    keeper._worker.end()
    assert ops == [Op.SNAPSHOT_COPIED], "what is held is of the quorum before"


def test_a_vote_tells_of_the_copies_of_its_own_quorum_alone() -> None:
    """Two losses before a commit: the second quorum's window begins where that of the first did."""
    specs = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(30, 50)) for name in "ab"]
    state = optimizer.StageState([blocks.Block(spec) for spec in specs], optimizer.adamw())
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    client, unheld = PlayedClient(), dict[SegmentKey, str]()
    client.pending = lambda: unheld  # type: ignore[attr-defined]
    keeper = keeper_of(SimpleNamespace(state=state, reducer=reducer), client)
    window, plan = Window(first=4, length=1), make_plan({0: ["pod.1"]})
    again = replace(plan, quorum=replace(plan.quorum, id=plan.quorum.id + 1, nonce="again"))
    keeper.snapshot(plan, 0, 0, Snapshot(4, window, (PlacedUnit("a", 0), PlacedUnit("b", 1))))
    keeper._worker.wait_idle()
    a, b = (header.key for header in client.headers)
    unheld[b] = "its holder is gone"
    assert keeper.status(4, logged=True).copied == 4

    may_copy = threading.Event()

    def hold() -> None:
        may_copy.wait()

    keeper._worker.submit(hold)
    place = keeper._place(plan, 0, 0)
    keeper.snapshot(again, 0, 0, Snapshot(4, window, (PlacedUnit("a", 0),)))
    with keeper._changed:
        keeper._to_copy += 1
    keeper._copy_state(place, a, window, 0)  # the last copy of the quorum before
    assert keeper.status(4, logged=True).copied == 4, "its own is still to be made"
    may_copy.set()
    keeper._worker.end()
    assert keeper.status(4, logged=True).copied == 5, "unit b is another member's to copy"


def test_a_state_names_the_window_of_its_instalment_when_the_next_one_has_begun() -> None:
    """As soon as it has left, apply may write the state, and the next window may begin."""
    spec = blocks.BlockSpec(name="a", build=lambda: nn.Linear(30, 50))
    state = optimizer.StageState([blocks.Block(spec)], optimizer.adamw())
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    client = PlayedClient()
    keeper = keeper_of(SimpleNamespace(state=state, reducer=reducer), client)
    window, left = Window(first=4, length=1), keeper._has_left

    def left_and_gone_on() -> None:
        left()
        keeper._writer.window = Window(first=5, length=3)

    keeper._has_left = left_and_gone_on  # type: ignore[method-assign]
    keeper.snapshot(make_plan({0: ["pod.1"]}), 0, 0, Snapshot(4, window, (PlacedUnit("a", 0),)))
    keeper._worker.end()

    (header,) = client.headers
    assert (header.key.version, header.window, header.num_instalments) == (4, 4, 1)


def test_a_damaged_copy_counts_again_once_all_have_loaded_what_was_before_it() -> None:
    played = SimpleNamespace(keep_from=lambda *_, **__: None)
    keeper = keeper_of(None, played)
    keys = [
        SegmentKey(lineage=0, position=0, unit=0, kind=SegmentKind.STATE, version=version)
        for version in (3, 5)
    ]
    keeper._bad = [BadSegment(key=key, pod=PodUid("pod")) for key in keys]

    keeper.go_back(0, 4, drops_later=False)
    assert [bad.key for bad in keeper._bad] == keys
    keeper.go_back(0, 4, drops_later=True)
    assert [bad.key for bad in keeper._bad] == keys[:1]


class CountingClient(PlayedClient):
    """One that also counts the rooms out, and the bytes of what it keeps."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left = self.least = size
        self.kept: dict[SegmentKey, int] = {}
        self.out = 0

    def ask_room(self, size_bytes: int, window: int = 0) -> Any:
        self.out += 1
        self.left -= size_bytes
        self.least = min(self.least, self.left)
        return super().ask_room(size_bytes, window)

    def written(self, room: Any, header: SegmentHeader, holders: Any, keep_from: int) -> None:
        super().written(room, header, holders, keep_from)
        self.out -= 1
        self.left += self.kept.pop(header.key, 0)
        self.kept[header.key] = header.size_bytes

    def give_back(self, room: Any) -> None:
        self.out -= 1
        self.left += room.memory.nbytes

    def decline_room(self, asked: Any) -> None:
        self.give_back(self.take_room(asked))

    def wait_held(self, keys: Any, until: Any) -> str:
        assert not until()
        return "" if set(keys) <= self.kept.keys() else "it is nowhere"


def logging_keeper(client: CountingClient) -> SegmentKeeper:
    specs = [blocks.BlockSpec(name=name, build=lambda: nn.Linear(30, 50)) for name in "abcd"]
    state = optimizer.StageState([blocks.Block(spec) for spec in specs], optimizer.adamw())
    reducer = SimpleNamespace(reduced=torch.zeros(state.layout.size))
    engine = SimpleNamespace(state=state, reducer=reducer, gradient_digests_of_units=dict[str, str])
    return keeper_of(engine, client)


def log_step(keeper: SegmentKeeper, step: int) -> bool:
    plan = make_plan({0: ["pod.1"]})
    wait = cast(Any, SimpleNamespace(ended=""))
    return asyncio.run(keeper.log(wait, plan, 0, 0, step, (0,)))


def test_a_step_that_is_logged_again_takes_the_room_of_one_unit_more() -> None:
    client = CountingClient(1 << 30)
    keeper = logging_keeper(client)
    assert log_step(keeper, 3)
    assert (client.out, len(client.kept)) == (0, 4)
    logged, unit = client.left, max(client.kept.values())
    assert client.least == logged

    assert log_step(keeper, 3)
    assert (client.out, client.left) == (0, logged)
    assert client.least == logged - unit


def test_room_that_was_asked_for_ahead_is_given_back_where_a_segment_finds_none() -> None:
    client = CountingClient(1 << 30)

    def full(asked: Any) -> Any:
        del asked
        client.out -= 1  # there is none to give back
        raise StoreFull("full")

    keeper, client.take_room = logging_keeper(client), full  # type: ignore[method-assign]
    client.decline_room = lambda _: setattr(client, "out", client.out - 1)  # type: ignore[method-assign]

    assert not log_step(keeper, 3)
    assert (client.out, client.headers) == (0, [])


@pytest.mark.parametrize("where", ["write", "digest"])
def test_room_is_given_back_whatever_breaks_while_a_segment_is_written(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("of the device")

    client = CountingClient(1 << 30)
    keeper = logging_keeper(client)
    monkeypatch.setattr(UnitContent, where, broken)
    with pytest.raises(RuntimeError, match="of the device"):
        log_step(keeper, 3)
    assert (client.out, client.left) == (0, 1 << 30)
