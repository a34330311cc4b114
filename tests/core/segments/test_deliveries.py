"""One segment on its way to its holders."""

from __future__ import annotations

from mainstay_core.base.ids import PodUid
from mainstay_core.segments.deliveries import Delivery

A, B = PodUid("a"), PodUid("b")


def test_a_segment_is_held_once_every_holder_has_confirmed_it() -> None:
    delivery = Delivery([A, B])
    delivery.answered(A)
    assert not delivery.is_over

    delivery.answered(B)

    assert delivery.is_over
    assert delivery.why_not == ""


def test_every_holder_that_does_not_keep_it_is_named() -> None:
    delivery = Delivery([B, A])
    delivery.answered(B, "it is full")
    delivery.answered(A, "it is gone")
    delivery.answered(A)

    assert delivery.why_not == "a: it is gone; b: it is full"


def test_without_holders_nothing_is_waited_for() -> None:
    assert Delivery([]).is_over
    assert Delivery([]).why_not == ""
