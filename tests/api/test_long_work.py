"""Long work leaves the event loop: it has the same results, and others get their turn meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from starlette.responses import JSONResponse

from mainstay_api.bodies import LONG_BYTES, LongRequest
from mainstay_api.long_work import (
    AT_ONCE_OF_ONE,
    LARGE,
    PIECE,
    Places,
    beside,
    in_pieces,
    long_answers,
    long_json,
)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randint(0, 4 if depth > 5 else 7)
    if kind < 5:
        return rng.choice((None, True, rng.random(), rng.randint(-9, 9), '\u00e4\n"\\'))
    if kind == 5:
        return {f"k{i}": drawn(rng, depth + 1) for i in range(rng.randint(0, 4))}
    return [drawn(rng, depth + 1) for _ in range(rng.randint(0, 4))]


@pytest.mark.parametrize("seed", range(200))
def test_an_answer_that_is_encoded_in_pieces_is_the_same(seed: int) -> None:
    value = drawn(random.Random(seed))
    answer = asyncio.run(long_json(lambda: value))
    assert bytes(answer.body) == bytes(JSONResponse(value).body)


def test_what_is_large_is_done_in_a_thread_and_what_is_small_at_once() -> None:
    async def run() -> tuple[int, int]:
        return (
            await beside(LARGE, threading.get_ident),
            await beside(LARGE + 1, threading.get_ident),
        )

    small, large = asyncio.run(run())
    assert small == threading.get_ident() != large


def test_others_get_their_turn_between_pieces() -> None:
    async def run() -> tuple[list[int], int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        done = await in_pieces(lambda number: number + 1, range(10 * PIECE))
        counting.cancel()
        return done, turns

    done, turns = asyncio.run(run())
    assert done == list(range(1, 10 * PIECE + 1))
    assert turns >= 9


def test_who_asks_for_many_long_answers_waits_for_themselves() -> None:
    async def run() -> tuple[int, int, int]:
        places, gate, inside = long_answers(), asyncio.Event(), []

        async def ask(person: str) -> None:
            async with places.place(person):
                inside.append(person)
                await gate.wait()

        asking = [asyncio.create_task(ask("greedy")) for _ in range(50)]
        await asyncio.sleep(0)
        asking += [asyncio.create_task(ask("modest")), asyncio.create_task(ask("other"))]
        for _ in range(5):
            await asyncio.sleep(0)
        seen = inside.count("greedy"), len(set(inside))
        gate.set()
        await asyncio.gather(*asking)
        return *seen, len(places._of)

    assert asyncio.run(run()) == (AT_ONCE_OF_ONE, 3, 0)


def test_an_asker_with_more_places_gets_them_while_it_is_busy() -> None:
    async def run() -> list[int]:
        places, gate, inside = Places(of_one=2), asyncio.Event(), []

        async def ask(num_more: int) -> None:
            async with places.place("job", num_more):
                inside.append(num_more)
                await gate.wait()

        asking, seen = [], []
        for num_more in (0, 3, 1):
            asking += [asyncio.create_task(ask(num_more)) for _ in range(10)]
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append(len(inside))
        gate.set()
        await asyncio.gather(*asking)
        return [*seen, len(inside), len(places._of), len(places._num_more)]

    assert asyncio.run(run()) == [2, 5, 5, 30, 0, 0]


@pytest.mark.parametrize("length", [10, LONG_BYTES + 10])
def test_a_long_body_is_parsed_in_a_thread_and_once(length: int) -> None:
    threads = []

    def parse(body: bytes) -> Any:
        threads.append(threading.get_ident())
        return json.loads(body)

    async def run() -> tuple[Any, Any]:
        body = json.dumps({"x": "y" * length}).encode()

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        request = LongRequest({"type": "http", "method": "POST", "headers": []}, receive)
        request.parse = parse
        return await request.json(), await request.json()

    first, second = asyncio.run(run())
    assert first is second
    assert first == {"x": "y" * length}
    here = threading.get_ident()
    assert len(threads) == (length > 10)
    assert here not in threads
