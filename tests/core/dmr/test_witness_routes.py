"""Chains of a swapped pipeline: a place of a type's computation has its number on the route."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.base.shape import Order
from mainstay_core.dmr.accounts import make_account
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.verdicts import Verdict
from mainstay_core.dmr.witness import (
    Exchanged,
    Sent,
    Telling,
    Told,
    first_difference,
    rule,
)
from mainstay_core.planning.routes import route_of
from mainstay_core.rank.steps.doubts import account_of, read_account
from mainstay_core.wire.votes import WitnessAccount

PASSES = (Pass.FORWARD, Pass.BACKWARD)
Wrong = Callable[[int, Pass, int, int], bool]
"""Whether a rank is wrong: position, pass, micro-batch, visit."""


def right(*_: object) -> bool:
    return False


def compute(
    stages: int,
    micro_batches: int,
    shard_type: int,
    is_wrong: Wrong = right,
    *,
    width: int = 1,
    rng: random.Random | None = None,
) -> Telling:
    """What a chain tells of a type. With ``rng`` micro-batches come in any order."""
    positions = range(stages * width)
    sent: dict[int, list[Sent]] = {p: [] for p in positions}
    exchanged: dict[int, list[Exchanged]] = {p: [] for p in positions}
    weights: dict[int, list[tuple[int, str]]] = {p: [] for p in positions}
    flows = [*range(micro_batches)]
    if rng is not None:
        rng.shuffle(flows)
    for flow in flows:
        number = shard_type * micro_batches + flow
        route = [visit.stage for visit in route_of(Order.SWAPPED, number, stages)]
        value = f"sample {number}"
        for in_pass, order in zip(PASSES, (1, -1), strict=True):
            for visit, stage in [*enumerate(route)][::order]:
                cell = range(stage * width, (stage + 1) * width)
                given = {}
                for position in cell:
                    given[position] = f"{hash((value, in_pass, visit, position))}"
                    if is_wrong(position, in_pass, flow, visit):
                        given[position] += "wrong"
                value = f"{hash(tuple(given.values()))}"
                for position in cell:
                    weights[position].append((flow, f"{visit} {in_pass} {value}"))
                    if width > 1:
                        told = {"given": (given[position],), "made": (value,), "visit": visit}
                        one = Exchanged(in_pass=in_pass, micro_batch=flow, **told)
                        exchanged[position].append(one)
                    ends = len(route) - 1 if in_pass is Pass.FORWARD else 0
                    if visit != ends:
                        at = {"in_pass": in_pass, "micro_batch": flow, "visit": visit}
                        sent[position].append(Sent(digest=value, **at))
    return tuple(
        make_account(
            sent[position],
            exchanged[position],
            (f"{hash(tuple(sorted(weights[position])))}",),
            in_order=False,
        )
        for position in positions
    )


def told(chain: int, attempt: int, telling: Telling) -> Told:
    cells = tuple(Slot(pod=PodUid(f"{'abc'[chain]}{p}"), index=0) for p in range(len(telling)))
    return Told(quorum=1, attempt=attempt, replica=chain, cells=cells, telling=telling)


@pytest.mark.parametrize(("stages", "width"), [(2, 1), (3, 1), (4, 1), (5, 1), (3, 2)])
def test_whoever_is_wrong_on_any_visit_of_any_route_is_named_and_no_other(
    stages: int, width: int
) -> None:
    rng = random.Random(f"{stages} {width}")
    for _ in range(150):
        micro_batches, shard_type = rng.randint(1, 3), rng.randrange(4)
        about = stages, micro_batches, shard_type
        routes = [
            route_of(Order.SWAPPED, shard_type * micro_batches + m, stages)
            for m in range(micro_batches)
        ]
        flow = rng.randrange(micro_batches)
        visit = rng.randrange(len(routes[flow]))
        position = routes[flow][visit].stage * width + rng.randrange(width)
        in_pass = rng.choice(PASSES)
        ends = visit == (len(routes[flow]) - 1 if in_pass is Pass.FORWARD else 0)
        first = (position, in_pass, flow, visit)
        # A device may be wrong at other places as well, and insist.
        wrong = {first} | {
            (position, p, m, v)
            for m in range(micro_batches)
            for p in PASSES
            for v, at in enumerate(routes[m])
            if at.stage == position // width and rng.random() < 0.3
        }

        def is_wrong(*place: object, places: set[object] = wrong) -> bool:  # type: ignore[assignment]
            return place in places

        good = compute(*about, width=width, rng=rng)
        assert good == compute(*about, width=width), "whatever the order in which they come"
        bad = compute(*about, is_wrong, width=width, rng=rng)
        difference = first_difference(good, bad, width)
        assert difference is not None
        assert position in difference.positions
        if not ends and len(wrong) == 1:
            expected = (in_pass, flow, visit)
            assert (difference.in_pass, difference.micro_batch, difference.visit) == expected
            assert f"visit {visit} of its route" in difference.describe()
        asked = [told(0, 1, bad), told(1, 1, good)]
        assert rule(asked, width).agreed is None
        asked += [told(0, 2, bad), told(1, 2, good), told(2, 2, good)]
        ruling = rule(asked, width)
        assert ruling.agreed == good
        named = {d.slot for d in ruling.deviations}
        assert named == {asked[0].cells[position]}, (first, ruling.reason)
        assert {d.verdict for d in ruling.deviations} == {Verdict.DETERMINISTIC}


def test_the_number_of_a_stage_does_not_say_who_was_first() -> None:
    """The first stage's layers come behind the second stage's: what it sends is wrong as well."""

    def second_stage(position: int, in_pass: Pass, flow: int, visit: int) -> bool:
        return (position, in_pass, visit) == (1, Pass.FORWARD, 1)

    good, bad = compute(4, 1, 1), compute(4, 1, 1, second_stage)
    differing = [p for p in range(4) if good[p] != bad[p]]
    assert differing[0] == 0
    difference = first_difference(good, bad)
    assert difference is not None
    assert (difference.position, difference.visit) == (1, 1)


def test_what_is_told_goes_over_the_wire_and_in_order_nothing_is_added() -> None:
    for account, width in itertools.product(compute(3, 2, 0, width=2), (1,)):
        del width
        sent = codec.dumps(account_of(account, 5))
        assert read_account(codec.loads(WitnessAccount, sent)) == account
    in_order = make_account(
        [Sent(in_pass=p, micro_batch=m, visit=1, digest=f"{p}{m}") for m in (1, 0) for p in PASSES],
        (),
        ("w",),
        in_order=True,
    )
    assert in_order.forward == ("forward0", "forward1")
    assert in_order.backward == ("backward0", "backward1")
    assert "sent" not in codec.dumps(account_of(in_order, 5))
    assert replace(in_order, sent=()) == in_order
