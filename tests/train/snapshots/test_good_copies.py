"""A replay reads copies that count, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mainstay_core.base.ids import PodUid
from mainstay_core.wire.segments import Holder, SegmentKey, SegmentKind, boundary_key
from mainstay_train.snapshots.good_copies import GoodCopies, Unusable
from mainstay_train.state.segments import Fetched, SegmentMissing

OWN = Holder(pod=PodUid("own"), address="own:1")
OTHER = Holder(pod=PodUid("other"), address="other:1")
KEY = boundary_key(0, 1, SegmentKind.ACTIVATION, 5, 0, 0)


class Stores:
    """The store of this pod, and another one; both have a copy."""

    def __init__(self, own: bytes, other: bytes, written: bytes | None = None) -> None:
        self.kept = {OWN.pod: own, OTHER.pod: other}
        self.written = written
        self.doubted: list[tuple[PodUid, str]] = []
        self.silent: frozenset[PodUid] = frozenset()
        """Pods whose stores do not answer when they are told something."""
        self.num_asked = 0
        self.interrupt = lambda: None

    def fetch(
        self, key: SegmentKey, holders: Sequence[Holder], into: memoryview, *, own: bool = True
    ) -> Fetched:
        pods = [OWN.pod] * own + [holder.pod for holder in holders]
        for pod in pods:
            if pod in self.kept:
                into[:] = self.kept[pod]
                digest = (self.written or self.kept[pod]).hex()
                header = SimpleNamespace(key=key, digest=digest)
                holder = None if pod == OWN.pod else OTHER
                return Fetched(cast(Any, header), holder)
        raise SegmentMissing(f"nobody has the {key}")

    def doubt(self, holder: Holder, header: Any) -> bool:
        self.num_asked += 1
        if holder.pod in self.silent:
            return False
        self.doubted.append((holder.pod, header.digest))
        return True

    def discard(self, key: SegmentKey) -> None:
        assert key == KEY
        del self.kept[OWN.pod]


def read(stores: Stores, holders: Sequence[Holder]) -> bytes:
    memory = memoryview(bytearray(1))
    copies = GoodCopies(cast(Any, stores), OWN.pod, lambda: "")
    copies.read(KEY, holders, memory, lambda: bytes(memory).hex())
    return bytes(memory)


def test_the_copy_of_the_own_pod_comes_first() -> None:
    assert read(Stores(b"a", b"b"), [OTHER, OWN]) == b"a"


def test_a_copy_of_the_own_pod_that_does_not_count_is_not_read() -> None:
    """It was blamed, or is a log of a refused attempt: it is as it was written, and wrong."""
    assert read(Stores(b"x", b"b"), [OTHER]) == b"b"
    with pytest.raises(Unusable, match="nobody has"):
        read(Stores(b"x", b"b"), [])


def test_a_damaged_copy_of_the_own_pod_is_discarded_and_another_one_is_read() -> None:
    stores = Stores(b"x", b"b", written=b"b")

    assert read(stores, [OWN, OTHER]) == b"b"
    assert OWN.pod not in stores.kept


def test_the_store_of_another_pod_hears_of_its_damaged_copy() -> None:
    stores = Stores(b"b", b"x", written=b"b")
    del stores.kept[OWN.pod]

    with pytest.raises(Unusable):
        read(stores, [OTHER])
    assert stores.doubted == [(OTHER.pod, b"b".hex())]


def test_what_is_proven_right_is_not_blamed() -> None:
    copies = GoodCopies(cast(Any, Stores(b"a", b"b")), OWN.pod, lambda: "")
    proven, doubted = KEY, replace(KEY, version=6)
    memory = memoryview(bytearray(1))
    for key in (proven, doubted):
        copies.read(key, [OWN], memory, lambda: bytes(memory).hex())

    copies.acquit(lambda key: key.version < 6)
    copies.blame()

    assert [(bad.key, bad.pod) for bad in copies.bad] == [(doubted, OWN.pod)]


def test_the_stores_hear_of_copies_of_which_something_wrong_was_made() -> None:
    stores = Stores(b"a", b"b")
    copies = GoodCopies(cast(Any, stores), OWN.pod, lambda: "")
    memory = memoryview(bytearray(1))
    for holders in ([OTHER, OWN], [OTHER]):
        copies.read(KEY, holders, memory, lambda: bytes(memory).hex())

    copies.blame()

    assert stores.doubted == [(OWN.pod, b"a".hex()), (OTHER.pod, b"b".hex())]


def test_a_store_that_does_not_hear_of_one_copy_is_not_told_of_the_others() -> None:
    stores = Stores(b"a", b"b")
    copies = GoodCopies(cast(Any, stores), OWN.pod, lambda: "")
    memory = memoryview(bytearray(1))
    for holders in ([OTHER], [OTHER], [OWN]):
        copies.read(KEY, holders, memory, lambda: bytes(memory).hex())
    stores.silent = frozenset({OTHER.pod})

    copies.blame()

    assert stores.num_asked == 2
    assert stores.doubted == [(OWN.pod, b"a".hex())]
    assert len(copies.bad) == 3


def test_what_another_may_have_made_wrong_gives_no_copy_up() -> None:
    stores = Stores(b"a", b"b")
    copies = GoodCopies(cast(Any, stores), OWN.pod, lambda: "")
    memory = memoryview(bytearray(1))
    copies.read(KEY, [OWN], memory, lambda: bytes(memory).hex())

    copies.is_alone = False
    copies.blame()

    assert copies.bad == []
    assert stores.num_asked == 0
    assert copies.differs
