"""What a listener to a job's stream gets, with a store of values."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from mainstay_core.control_plane.job_store import StoreUnavailableError
from mainstay_core.control_plane.stream import JobStream, StreamItem, order
from mainstay_core.job.phase import JobPhase

LAST = 12


def entry(number: int, kind: str = "plan") -> StreamItem:
    return StreamItem(id=f"{number}-0", kind=kind, data=number)


class Stored:
    """A store whose calls take a while, with entries that come while an answer travels."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self.entries: list[StreamItem] = []
        self.phase = JobPhase.RUNNING
        self.away = 0
        self._changed = asyncio.Event()

    def add(self, item: StreamItem) -> None:
        self.entries.append(item)
        self._changed.set()

    async def _travel(self) -> None:
        if self.away:
            self.away -= 1
            raise StoreUnavailableError("away")
        for _ in range(self._rng.randint(1, 6) if self._rng else 1):
            await asyncio.sleep(0)

    async def fetch_plan(self) -> tuple[Any, str, str]:
        plans = [e.data for e in self.entries if e.kind == "plan"]
        found = plans[-1] if plans else None
        cursor = self.entries[-1].id if self.entries else "0-0"
        await self._travel()
        return found, cursor, self.phase.value

    async def read_stream(self, after: str, block_s: float | None) -> list[StreamItem]:
        while True:
            found = self._after(after)
            await self._travel()
            if found or block_s is None:
                return found
            if not self._after(after):
                self._changed.clear()
                await self._changed.wait()

    def _after(self, position: str) -> list[StreamItem]:
        return [e for e in self.entries if order(e.id) > order(position)]


class Ear:
    def __init__(self) -> None:
        self._items: asyncio.Queue[StreamItem | None] = asyncio.Queue()

    def put(self, item: StreamItem) -> None:
        self._items.put_nowait(item)

    async def take(self) -> StreamItem | None:
        return await self._items.get()

    def cut(self) -> None:
        self._items.put_nowait(None)


class Stream(JobStream[Ear]):
    def __init__(self, store: Stored) -> None:
        super().__init__(store)
        self.reader: asyncio.Task[None] | None = None
        self.failures: list[str] = []

    def start_reader(self, cursor: str) -> bool:
        if self.reader is not None:
            return False
        self.reader = asyncio.create_task(self.read(cursor))
        return True

    def tell_end(self, phase: str) -> Any:
        return f"it is {phase}"

    async def pause(self, delay_s: float, why: str) -> None:
        assert delay_s > 0
        self.failures.append(why)
        await asyncio.sleep(0)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def hear(stream: Stream, ear: Ear, last_id: str | None, until: int) -> list[StreamItem]:
    """Listen until the entry ``until`` has come."""
    heard = []
    async for item in stream.follow(ear, last_id):
        heard.append(item)
        if item.data == until:
            break
    return heard


def test_a_listener_gets_the_plan_then_what_it_missed_then_what_comes() -> None:
    async def scenario() -> None:
        store = Stored()
        for number in (1, 2, 3):
            store.add(entry(number))
        stream = Stream(store)
        listening = asyncio.create_task(hear(stream, Ear(), "1-0", 5))
        while len(store.entries) < 5:
            await asyncio.sleep(0)
            if stream.reader is not None:
                store.add(entry(len(store.entries) + 1))
        heard = await listening
        assert [(i.id, i.data) for i in heard] == [
            ("", 3),
            ("2-0", 2),
            ("3-0", 3),
            ("4-0", 4),
            ("5-0", 5),
        ]
        stream.close()

    run(scenario())


def test_a_new_listener_goes_on_from_where_the_plan_is_current() -> None:
    async def scenario() -> None:
        store = Stored()
        store.add(entry(1))
        stream = Stream(store)
        assert await hear(stream, Ear(), None, 1) == [entry(1)]
        stream.close()

    run(scenario())


def test_history_is_no_listeners_business() -> None:
    async def scenario() -> None:
        store = Stored()
        store.add(entry(1))
        store.add(entry(2, "event"))
        stream = Stream(store)
        listening = asyncio.create_task(hear(stream, Ear(), "0-0", 4))
        while stream.reader is None:
            await asyncio.sleep(0)
        store.add(entry(3, "event"))
        store.add(entry(4, "stop"))
        assert [i.data for i in await listening] == [1, 1, 4]
        stream.close()

    run(scenario())


def test_an_ended_job_says_so() -> None:
    async def scenario() -> None:
        store = Stored()
        store.phase = JobPhase.COMPLETE
        stream, ear = Stream(store), Ear()
        ear.cut()
        heard = [item async for item in stream.follow(ear, None)]
        assert heard == [StreamItem(id="", kind="stop", data="it is complete")]
        stream.close()

    run(scenario())


def test_a_store_that_is_away_is_read_again() -> None:
    async def scenario() -> None:
        store = Stored()
        stream = Stream(store)
        listening = asyncio.create_task(hear(stream, Ear(), None, 1))
        while stream.reader is None:
            await asyncio.sleep(0)
        store.away = 3
        store.add(entry(1))
        assert [i.data for i in await listening] == [1]
        assert stream.failures == ["the stream is interrupted: away"] * 3
        stream.close()

    run(scenario())


def test_no_entry_is_lost_or_told_twice_however_calls_and_entries_meet() -> None:
    async def scenario(seed: int) -> None:
        rng = random.Random(seed)
        store = Stored(rng)
        stream = Stream(store)
        ears: list[asyncio.Task[list[StreamItem]]] = []
        for number in range(1, LAST + 1):
            store.add(entry(number))
            if len(ears) < 4 and rng.random() < 0.5:
                last = f"{rng.randint(0, number)}-0"
                ears.append(asyncio.create_task(hear(stream, Ear(), last, LAST)))
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(0)
        for heard in await asyncio.gather(*ears):
            numbers = [i.data for i in heard if i.id]
            assert numbers == list(range(LAST + 1 - len(numbers), LAST + 1)), (
                f"seed {seed}: {numbers}"
            )
        stream.close()

    for seed in range(300):
        run(scenario(seed))
