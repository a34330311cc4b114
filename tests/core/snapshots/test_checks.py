"""Damaged copies by their checksums."""

from __future__ import annotations

from tests.core.segments.keys import key_of

from mainstay_core.snapshots.checks import judge
from mainstay_core.wire.segments import Run, SegmentKey
from mainstay_core.wire.stores import CheckedSegments, StoreCheck

SUMS = ("0000000a", "0000000b", "0000000c")
"""Of versions 3, 4 and 6."""


def check(
    *sums: str,
    changed: tuple[SegmentKey, ...] = (),
    doubted: tuple[SegmentKey, ...] = (),
    lost: tuple[SegmentKey, ...] = (),
    lineage: int = 0,
    number: int = 1,
) -> StoreCheck:
    line = CheckedSegments(
        key=key_of(3, lineage=lineage),
        unit_name="layer.0",
        versions=(Run(first=3, last=4), Run(first=6, last=6)),
        sums="".join(sums),
    )
    return StoreCheck(
        number=number, num_segments=3, size_bytes=30, lineage=lineage, segments=(line,),
        changed=changed, doubted=doubted, lost=lost,
    )  # fmt: skip


def named(*told: tuple[str, StoreCheck]) -> list[tuple[str, int]]:
    return [(d.pod, d.key.version) for d in judge(dict(told)).damaged]


def test_equal_copies_are_good() -> None:
    verdict = judge({"a": check(*SUMS), "b": check(*SUMS)})
    assert verdict.damaged == ()
    assert (verdict.num_compared, verdict.num_alone) == (3, 0)


def test_a_copy_that_differs_from_most_is_named_with_its_pod_and_unit() -> None:
    bad = check(SUMS[0], "00000000", SUMS[2])
    (found,) = judge({"a": check(*SUMS), "b": bad, "c": check(*SUMS)}).damaged
    assert (found.pod, found.unit_name, found.key) == ("b", "layer.0", key_of(4))
    assert found.why == "it differs from 2 other copies"


def test_of_two_copies_that_differ_both_are_named() -> None:
    bad = check(*SUMS[:2], "00000000")
    assert named(("a", check(*SUMS)), ("b", bad)) == [("a", 6), ("b", 6)]


def test_a_copy_that_has_changed_since_a_check_is_the_damaged_one() -> None:
    bad = check("00000000", *SUMS[1:], changed=(key_of(3),))
    assert named(("a", check(*SUMS)), ("b", bad)) == [("b", 3)]


def test_a_copy_that_a_reader_has_found_damaged_is_named_though_all_have_its_bytes() -> None:
    told = {"a": check(*SUMS, doubted=(key_of(4),)), "b": check(*SUMS)}
    (found,) = judge(told).damaged
    assert (found.pod, found.key, found.unit_name) == ("a", key_of(4), "layer.0")
    assert found.why == "it was found damaged or void before, and was not written again"


def test_a_copy_that_differs_from_one_that_was_found_damaged_is_the_good_one() -> None:
    bad = check(*SUMS[:2], "00000000", doubted=(key_of(6),))
    assert named(("a", check(*SUMS)), ("b", bad)) == [("b", 6)]


def test_a_copy_that_no_key_finds_is_named_beside_a_good_one_of_that_key() -> None:
    verdict = judge({"a": check(*SUMS, lost=(key_of(4), key_of(9))), "b": check(*SUMS)})
    assert [(d.pod, d.key.version, d.unit_name) for d in verdict.lost] == [
        ("a", 4, "layer.0"),
        ("a", 9, "layer.0"),
    ]
    assert (verdict.damaged, verdict.num_compared) == ((), 3)


def test_one_copy_alone_is_counted_and_not_compared() -> None:
    verdict = judge({"a": check(*SUMS)})
    assert (verdict.num_compared, verdict.num_alone, verdict.damaged) == (0, 3, ())


def test_a_store_of_an_older_lineage_has_nothing_to_compare() -> None:
    verdict = judge({"a": check("00000000", *SUMS[1:]), "b": check(*SUMS, lineage=1)})
    assert verdict.damaged == ()
    assert verdict.num_alone == 3


def test_nothing_told_is_nothing_found() -> None:
    assert judge({}).damaged == ()
