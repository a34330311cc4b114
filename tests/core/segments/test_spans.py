"""Places in an arena, against an arena that marks every page."""

from __future__ import annotations

import random

import pytest

from mainstay_core.segments.spans import NOWHERE, PAGE_BYTES, Span, SpanAllocator, room_of


class Pages:
    """An arena as a list of its pages: the slow twin."""

    def __init__(self, num_pages: int) -> None:
        self.taken = [False] * num_pages

    def allocate(self, size: int) -> Span | None:
        num = -(-size // PAGE_BYTES)
        if num == 0:
            return NOWHERE
        for first in range(len(self.taken) - num + 1):
            if not any(self.taken[first : first + num]):
                self.taken[first : first + num] = [True] * num
                return Span(first * PAGE_BYTES, size)
        return None

    def free(self, span: Span) -> None:
        first, num = span.offset // PAGE_BYTES, -(-span.size // PAGE_BYTES)
        assert all(self.taken[first : first + num])
        self.taken[first : first + num] = [False] * num

    @property
    def largest(self) -> int:
        runs = "".join(" x"[page] for page in self.taken).split("x")
        return max(map(len, runs)) * PAGE_BYTES


@pytest.mark.parametrize("seed", range(40))
def test_places_are_those_of_an_arena_that_marks_every_page(seed: int) -> None:
    rng = random.Random(seed)
    num_pages = rng.choice([1, 2, 7, 40])
    spans, pages, given = SpanAllocator(num_pages * PAGE_BYTES), Pages(num_pages), []
    for _ in range(300):
        if given and rng.random() < 0.45:
            span = given.pop(rng.randrange(len(given)))
            spans.free(span)
            pages.free(span)
        else:
            size = rng.choice([0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1])
            size += rng.randrange(4) * PAGE_BYTES * rng.randrange(2)
            span = spans.allocate(size)
            assert span == pages.allocate(size)
            given += [] if span is None else [span]
        assert spans.free_bytes == pages.taken.count(False) * PAGE_BYTES
        assert spans.largest == pages.largest
    for span in given:
        spans.free(span)
    assert spans.allocate(num_pages * PAGE_BYTES) == Span(0, num_pages * PAGE_BYTES)


def test_no_two_places_share_a_page() -> None:
    spans = SpanAllocator(4 * PAGE_BYTES)

    given = [spans.allocate(1), spans.allocate(PAGE_BYTES + 1), spans.allocate(PAGE_BYTES)]

    assert given == [Span(0, 1), Span(PAGE_BYTES, PAGE_BYTES + 1), Span(3 * PAGE_BYTES, PAGE_BYTES)]
    assert spans.allocate(1) is None


def test_nothing_takes_no_room() -> None:
    spans = SpanAllocator(0)

    assert room_of(0) == 0
    assert spans.allocate(0) == NOWHERE
    spans.free(NOWHERE)
    assert spans.free_bytes == spans.largest == 0
