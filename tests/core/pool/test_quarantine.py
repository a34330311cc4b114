"""Quarantine: repeat offenders go, one mistake does not, and never too many nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.core.plans import make_plan
from tests.core.rank.test_votes import votes_of

from mainstay_core.pool.quarantine import (
    Mismatch,
    QuarantineMode,
    QuarantinePolicy,
    QuarantineState,
    num_allowed,
    plan_quarantine,
)
from mainstay_core.rank.votes import judge
from mainstay_core.wire.facts import FactKind

NODES = [f"n{i}" for i in range(20)]
AVOID = QuarantinePolicy(mode=QuarantineMode.AVOID)


def state(*mismatches: tuple[float, str]) -> QuarantineState:
    found = [
        Mismatch(at_s=at_s, node=node, pod=f"on-{node}", quorum=f"q{i}")
        for i, (at_s, node) in enumerate(mismatches)
    ]
    return QuarantineState().with_mismatches(found)


def test_one_mismatch_is_bad_luck_and_a_second_one_is_not() -> None:
    assert plan_quarantine(state((1.0, "n1")), NODES, AVOID, 2.0).new == ()
    plan = plan_quarantine(state((1.0, "n1"), (2.0, "n1")), NODES, AVOID, 3.0)
    assert [(q.node, q.reason) for q in plan.new] == [("n1", "2 mismatches within 86400 s")]
    assert plan.state.avoided == ("n1",)


def test_a_mismatch_that_is_told_again_is_the_same_one() -> None:
    told = Mismatch(at_s=1.0, node="n1", pod="p", quorum="q2")
    twice = QuarantineState().with_mismatches([told]).with_mismatches([told, told])
    assert plan_quarantine(twice, NODES, AVOID, 2.0).new == ()


def test_old_mismatches_count_no_more() -> None:
    policy = replace(AVOID, window_s=10.0)
    seen = state((1.0, "n1"), (9.0, "n1"))
    assert plan_quarantine(seen, NODES, policy, 12.0).new == ()
    assert plan_quarantine(seen, NODES, policy, 11.0).new != ()


@pytest.mark.parametrize(
    ("num_nodes", "percent", "most"), [(20, 10, 2), (19, 10, 1), (3, 10, 1), (3, 0, 0), (3, 100, 3)]
)
def test_the_guard_is_a_share_of_the_jobs_nodes(num_nodes: int, percent: int, most: int) -> None:
    assert num_allowed(num_nodes, percent) == most


def test_beyond_the_guard_the_worst_go_and_the_rest_is_named() -> None:
    times = [(float(i), node) for node, n in (("n1", 2), ("n2", 4), ("n3", 3)) for i in range(n)]
    plan = plan_quarantine(state(*times), NODES, AVOID, 9.0)
    assert [q.node for q in plan.new] == ["n2", "n3"]
    assert plan.spared == (("n1", "2 mismatches within 86400 s, but 2 of at most 2 nodes are out"),)
    again = plan_quarantine(plan.state, set(NODES) - {"n2", "n3"}, AVOID, 10.0)
    assert (again.new, again.state.avoided) == ((), ("n2", "n3")), "they stay, and count as nodes"


def test_a_dry_run_only_says_so_and_counts_for_nothing_once_it_is_meant() -> None:
    seen = state((1.0, "n1"), (2.0, "n1"))
    dry = plan_quarantine(seen, NODES, replace(AVOID, mode=QuarantineMode.DRY_RUN), 3.0)
    assert [q.dry_run for q in dry.new] == [True]
    assert dry.state.avoided == ()
    meant = plan_quarantine(dry.state, NODES, AVOID, 4.0)
    assert [(q.node, q.dry_run) for q in meant.new] == [("n1", False)]


def test_off_changes_nothing() -> None:
    seen = state((1.0, "n1"), (2.0, "n1"))
    assert plan_quarantine(seen, NODES, QuarantinePolicy(), 3.0).state is seen


OUT = plan_quarantine(state((1.0, "n1"), (2.0, "n1")), NODES, AVOID, 3.0).state


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (replace(AVOID, mode=QuarantineMode.OFF), "recovery.quarantine.mode is Off"),
        (replace(AVOID, mode=QuarantineMode.DRY_RUN), "recovery.quarantine.mode is DryRun"),
        (replace(AVOID, trusted=frozenset({"n1"})), "recovery.quarantine.trustedNodes names it"),
    ],
)
def test_a_person_takes_a_node_out_of_quarantine(policy: QuarantinePolicy, why: str) -> None:
    plan = plan_quarantine(OUT, NODES, policy, 4.0)
    assert [(q.node, words) for q, words in plan.released] == [("n1", why)]
    assert (plan.new, plan.state.avoided) == ((), ())
    again = plan_quarantine(plan.state, NODES, policy, 5.0)
    assert (again.new, again.released) == ((), ()), "once"


def test_time_alone_lets_no_node_out_and_a_trusted_one_comes_in_again_when_it_is_not() -> None:
    assert plan_quarantine(OUT, NODES, AVOID, 1e9).state.avoided == ("n1",)
    trusted = plan_quarantine(OUT, NODES, replace(AVOID, trusted=frozenset({"n1"})), 4.0).state
    assert [q.node for q in plan_quarantine(trusted, NODES, AVOID, 5.0).new] == ["n1"]


def test_who_differs_is_named_by_the_verdict_the_parked_and_the_record_of_the_recovery(
    start: Callable[..., Any],
) -> None:
    plan = make_plan({r: [f"{'abc'[r]}.1"] for r in range(3)})
    votes = votes_of(plan)
    votes[1] = replace(votes[1], state="other")
    verdict = judge(plan, votes, None, "")
    assert verdict.differing == (plan.members[1].slot,)
    assert "parameters of r1.s0.i0 on b/0 differ" in verdict.reason
    assert judge(plan, votes_of(plan), None, "").differing == ()

    world = start(replicas=3, lanes=3, stages=1)
    bad = world.plan.members[1].slot
    for member in world.plan.members:
        world.tell(world.about(FactKind.PARKED, member, evidence=verdict.reason, differing=(bad,)))
    world.tick(after_s=1.0)
    recovery = world.recoveries()[world.plan.quorum.id]
    assert recovery.differing == (bad,)
    assert verdict.reason in recovery.fault, "people are told in words"


def test_a_collective_that_failed_for_another_reason_is_no_mismatch(
    start: Callable[..., Any],
) -> None:
    world = start(replicas=3, lanes=3, stages=1)
    for member in world.plan.members:
        world.park(member)
    world.tick(after_s=1.0)
    assert world.recoveries()[world.plan.quorum.id].differing == ()
