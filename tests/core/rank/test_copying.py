"""Whichever sources are slow, send wrong bits or are lost: every chunk is right in the end."""

from __future__ import annotations

import random

import pytest

from mainstay_core.rank.copying import MAX_OWING, ChunkTurns


def test_sources_take_turns_and_a_fast_one_gives_more() -> None:
    turns = ChunkTurns(5)
    assert [turns.ask("a"), turns.ask("b"), turns.ask("a")] == [0, 1, 2]
    assert turns.came("a", 0)
    turns.right(0)
    assert [turns.ask("a"), turns.ask("b")] == [3, 4]


def test_what_a_lost_source_owes_is_sent_by_the_others() -> None:
    turns = ChunkTurns(3)
    assert [turns.ask("a"), turns.ask("a"), turns.ask("b")] == [0, 1, 2]
    turns.lost("a")
    assert [turns.ask("b"), turns.ask("b"), turns.ask("b")] == [0, 1, None]


def test_at_the_end_a_slow_source_holds_up_nobody() -> None:
    turns = ChunkTurns(2)
    assert [turns.ask("slow"), turns.ask("b")] == [0, 1]
    assert turns.came("b", 1)
    turns.right(1)
    assert turns.ask("b") == 0
    assert turns.ask("c") is None, f"{MAX_OWING} sources owe it"
    assert turns.came("b", 0)
    assert not turns.came("slow", 0), "it is being written"
    turns.right(0)
    assert turns.is_complete
    assert not turns.came("slow", 0)


def test_a_chunk_with_another_digest_is_asked_for_again() -> None:
    turns = ChunkTurns(1)
    assert [turns.ask("bad"), turns.ask("b")] == [0, 0]
    assert turns.came("bad", 0)
    assert not turns.came("b", 0), "this one is dropped: the memory is being written"
    turns.wrong(0)
    turns.lost("bad")
    assert turns.ask("b") == 0


def test_a_state_without_chunks_is_complete() -> None:
    assert ChunkTurns(0).is_complete


@pytest.mark.parametrize("seed", range(300))
def test_every_chunk_is_written_right_once_while_one_source_lasts(seed: int) -> None:
    rng = random.Random(seed)
    turns = ChunkTurns(num_chunks := rng.randint(1, 12))
    bad = {f"s{i}": rng.random() < 0.2 for i in range(rng.randint(1, 4))}
    bad["s0"] = False
    owed: dict[str, list[int]] = {source: [] for source in bad}
    writing: dict[str, int] = {}
    right: list[int] = []
    for _ in range(10_000):
        if turns.is_complete:
            break
        source = rng.choice([*owed])
        if source in writing:
            chunk = writing.pop(source)
            if bad[source]:
                turns.wrong(chunk)
                turns.lost(source)
                del owed[source]
            else:
                turns.right(chunk)
                right.append(chunk)
        elif source != "s0" and rng.random() < 0.05:
            turns.lost(source)
            del owed[source]
        elif len(owed[source]) < 2 and (asked := turns.ask(source)) is not None:
            assert asked not in right
            owed[source].append(asked)
        elif owed[source]:
            came = owed[source].pop(0)
            if turns.came(source, came):
                assert came not in writing.values()
                writing[source] = came
        for chunk in range(num_chunks):
            assert sum(chunk in chunks for chunks in owed.values()) <= MAX_OWING
    assert sorted(right) == [*range(num_chunks)]
    assert turns.is_complete
