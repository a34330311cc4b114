"""Repair: what is made, ended and told, from what is wanted and what is seen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstay_core.base import codec
from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import LossCause, PodDemand, demand_of
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import (
    OUT_OF_SERVICE,
    Disruption,
    ObservedNode,
    ObservedPod,
    PodPhase,
    Taint,
    Toleration,
)
from mainstay_core.pool.repair import KEEP_FAILED, Repair, RepairPolicy, free_indexes, plan_repair
from mainstay_core.wire.facts import FactKind
from mainstay_core.wire.page import PodsPage

NOW_S = 10_000.0


def pod(index: int, **fields: Any) -> ObservedPod:
    return ObservedPod(
        **{
            "uid": PodUid(f"u{index}"),
            "name": f"demo-{index}",
            "index": index,
            "node": f"n{index}",
            "phase": PodPhase.RUNNING,
            "ready": True,
            **fields,
        }
    )


def uid(index: int) -> PodUid:
    return PodUid(f"u{index}")


def demand(num_pods: int, *living: int, **fields: Any) -> PodDemand:
    return PodDemand(num_pods=num_pods, living={uid(i): f"demo-{i}" for i in living}, **fields)


def repair(pods: list[ObservedPod], wanted: PodDemand, **fields: Any) -> Repair:
    names = ("before", "counted", "accounted", "leaving")
    memory = PoolMemory(**{name: fields.pop(name) for name in names if name in fields})
    given = {"memory": memory, "nodes": None, "policy": RepairPolicy(), "now_s": NOW_S, **fields}
    return plan_repair(pods=pods, demand=wanted, **given)


def seen(*pods: ObservedPod) -> dict[PodUid, ObservedPod]:
    return {p.uid: p for p in pods}


def test_all_pods_are_made_at_once() -> None:
    assert repair([], demand(5)).make == (0, 1, 2, 3, 4)


def test_nothing_is_done_when_all_is_as_it_should_be() -> None:
    done = repair([pod(0), pod(1)], demand(2, 0, 1), before=seen(pod(0), pod(1)))

    assert (done.make, done.end, done.tell, done.losses) == ((), (), (), ())


def test_a_vanished_pod_is_told_and_made_anew_with_the_smallest_free_index() -> None:
    done = repair([pod(1), pod(2)], demand(3, 0, 1, 2), before=seen(pod(0), pod(1), pod(2)))

    (fact,) = done.tell
    assert (fact.kind, fact.pod) == (FactKind.POD_GONE, uid(0))
    assert fact.evidence == "pod demo-0 was deleted"
    assert done.make == (0,)


def test_a_pod_that_only_the_api_remembers_is_told_as_gone() -> None:
    done = repair([pod(1)], demand(2, 0, 1))

    assert [f.pod for f in done.tell] == [uid(0)]
    assert done.losses[0].evidence == "there is no pod demo-0 with uid u0"


def test_the_index_of_a_pod_that_is_ending_is_not_used_yet() -> None:
    ending = pod(0, terminating=True, ends_by_s=NOW_S + 30)

    assert repair([ending, pod(1)], demand(2, 0, 1)).make == (2,)


def test_a_deleted_pod_that_still_serves_leaves_and_has_a_deadline() -> None:
    ending = pod(0, terminating=True, ends_by_s=NOW_S + 30)

    (fact,) = repair([ending, pod(1)], demand(2, 0, 1)).tell

    assert (fact.kind, fact.pod, fact.grace_s) == (FactKind.LEAVING, uid(0), 30)


def test_what_is_known_to_leave_is_not_told_again() -> None:
    ending = pod(0, terminating=True, ends_by_s=NOW_S + 30)

    assert repair([ending], demand(1, 0, leaving=frozenset({uid(0)}))).tell == ()


@pytest.mark.parametrize(
    ("fields", "cause", "counts"),
    [
        ({"disruption": Disruption.PREEMPTED}, LossCause.PREEMPTED, False),
        ({"disruption": Disruption.EVICTED}, LossCause.EVICTED, False),
        ({"disruption": Disruption.TAINTED}, LossCause.NODE_LOST, True),
        ({"disruption": Disruption.NODE_SHUTDOWN}, LossCause.NODE_SHUTDOWN, False),
        ({"failure": "code 1"}, LossCause.FAILED, True),
        ({"failure": "code 137", "out_of_memory": True}, LossCause.OUT_OF_MEMORY, True),
        ({"phase": PodPhase.SUCCEEDED}, LossCause.LEFT, False),
        ({"ended_for": "the job does not need it"}, LossCause.ENDED, False),
    ],
)
def test_a_loss_has_a_cause_and_counts_only_if_nobody_wanted_it(
    fields: dict[str, Any], cause: LossCause, counts: bool
) -> None:
    lost = pod(0, **{"phase": PodPhase.FAILED, **fields})

    (loss,) = repair([lost], demand(1, 0), before=seen(pod(0))).losses

    assert (loss.cause, loss.counts) == (cause, counts)
    assert "demo-0" in loss.evidence


def test_a_node_that_is_not_ready_is_a_hint_and_no_loss() -> None:
    nodes = {"n0": ObservedNode(name="n0", ready=False)}

    done = repair([pod(0)], demand(1, 0), before=seen(pod(0)), nodes=nodes)

    assert (done.tell, done.losses, done.make) == ((), (), ())


def test_a_pod_of_a_silent_node_is_replaced_once_the_api_has_given_it_up() -> None:
    silent = ObservedNode(name="n0", ready=False, not_ready_since_s=NOW_S - 299)
    nodes = {"n0": silent, "n1": ObservedNode(name="n1")}

    given_up = demand(2, 1, known=frozenset({uid(0), uid(1)}))
    done = repair([pod(0), pod(1)], given_up, before=seen(pod(0), pod(1)), nodes=nodes)

    assert (done.end, done.make) == ((), (2,))
    later = {**nodes, "n0": dataclasses.replace(silent, not_ready_since_s=NOW_S - 300)}
    done = repair([pod(0), pod(1)], given_up, before=seen(pod(0), pod(1)), nodes=later)
    assert ([end.uid for end in done.end], done.make) == ([uid(0)], (2,))
    # One that has not come yet may still come: nodes recover.
    assert repair([pod(0), pod(1)], demand(2, 1), nodes=nodes).end == ()


def test_a_node_that_was_never_seen_may_be_new() -> None:
    assert repair([pod(0)], demand(1, 0), before=seen(pod(0)), nodes={}).losses == ()


def test_a_node_that_is_no_more_takes_its_pods_with_it() -> None:
    nodes = {"n0": ObservedNode(name="n0", gone=True)}

    done = repair([pod(0), pod(1)], demand(2, 0, 1), before=seen(pod(0), pod(1)), nodes=nodes)

    assert [(loss.uid, loss.cause) for loss in done.losses] == [(uid(0), LossCause.NODE_LOST)]
    assert done.make == (2,)


def test_a_node_out_of_service_takes_its_pods_with_it_if_it_is_silent_as_well() -> None:
    taint = Taint(key=OUT_OF_SERVICE, effect="NoExecute", value="nodeshutdown")

    def told(node: ObservedNode) -> Repair:
        pods = [pod(0), pod(1)]
        return repair(pods, demand(2, 0, 1), before=seen(*pods), nodes={"n0": node})

    lost = told(ObservedNode(name="n0", ready=False, taints=(taint,)))
    assert [(f.kind, f.pod) for f in lost.tell] == [(FactKind.POD_GONE, uid(0))]
    assert [(loss.cause, loss.counts) for loss in lost.losses] == [(LossCause.NODE_LOST, True)]
    assert (lost.make, [e.uid for e in lost.end]) == ((2,), [uid(0)])

    leaving = told(ObservedNode(name="n0", ready=True, taints=(taint,)))
    assert [(f.kind, f.pod) for f in leaving.tell] == [(FactKind.LEAVING, uid(0))]


def test_what_a_taint_evicts_from_a_node_that_works_is_somebody_s_will() -> None:
    evicted = pod(0, phase=PodPhase.FAILED, disruption=Disruption.TAINTED)

    def cause(**fields: Any) -> LossCause:
        nodes = {"n0": ObservedNode(name="n0", **fields)}
        return repair([evicted], demand(1, 0), before=seen(pod(0)), nodes=nodes).losses[0].cause

    assert cause() is LossCause.EVICTED
    assert cause(ready=False) is LossCause.NODE_LOST


def test_a_cordoned_node_s_pods_hand_over_before_they_are_ended() -> None:
    nodes = {"n0": ObservedNode(name="n0", cordoned=True)}
    pods = [pod(0), pod(1)]

    first = repair(pods, demand(2, 0, 1), nodes=nodes)

    assert [(f.kind, f.pod) for f in first.tell] == [(FactKind.LEAVING, uid(0))]
    assert (first.make, first.end) == ((2,), ())

    leaving = demand(2, 0, 1, leaving=frozenset({uid(0)}), ending=(uid(0),))
    (end,) = repair(pods, leaving, nodes=nodes).end
    assert (end.uid, end.why) == (uid(0), "node n0 is cordoned")


def test_a_cordon_can_be_left_to_evictions() -> None:
    nodes = {"n0": ObservedNode(name="n0", cordoned=True)}

    assert (
        repair([pod(0)], demand(1, 0), nodes=nodes, policy=RepairPolicy(ignore_cordon=True)).tell
        == ()
    )


def test_only_taints_that_the_pods_do_not_bear_drive_them_out() -> None:
    def told(taint: Taint, *tolerations: Toleration) -> bool:
        nodes = {"n0": ObservedNode(name="n0", taints=(taint,))}
        borne = pod(0, tolerations=tolerations)
        return bool(repair([borne], demand(1, 0), nodes=nodes).tell)

    maintenance = Taint(key="maintenance", effect="NoSchedule", value="soon")
    assert told(maintenance)
    assert told(maintenance, Toleration(key="maintenance", value="later"))
    assert not told(maintenance, Toleration(key="maintenance", value="soon"))
    assert not told(maintenance, Toleration(operator="Exists"))
    assert not told(Taint(key="maintenance", effect="PreferNoSchedule"))
    assert not told(Taint(key="node.kubernetes.io/unreachable", effect="NoExecute"))
    soon = Taint(key="maintenance", effect="NoExecute")
    assert told(soon, Toleration(key="maintenance", operator="Exists", for_a_while=True))


def test_a_pod_without_work_on_a_cordoned_node_is_ended_at_once() -> None:
    nodes = {"n0": ObservedNode(name="n0", cordoned=True)}

    done = repair([pod(0)], demand(1), nodes=nodes)

    assert ([e.uid for e in done.end], done.make, done.tell) == ([uid(0)], (1,), ())


def test_fewer_wanted_pods_end_those_first_that_never_registered() -> None:
    pods = [pod(0), pod(1), pod(2, node="", ready=False, phase=PodPhase.PENDING)]

    done = repair(pods, demand(2, 0, 1))

    assert [e.uid for e in done.end] == [uid(2)]


def test_pods_that_serve_are_ended_only_as_the_api_says() -> None:
    pods = [pod(0), pod(1), pod(2)]

    assert repair(pods, demand(2, 0, 1, 2)).end == ()
    assert [e.uid for e in repair(pods, demand(2, 0, 1, 2, ending=(uid(1),))).end] == [uid(1)]


def test_a_suspended_job_keeps_no_pod_and_one_that_is_over_ends_none() -> None:
    pods = [pod(0), pod(1)]

    suspended = repair(pods, demand(0, 0, 1, suspended=True))
    over = repair([pod(0, phase=PodPhase.SUCCEEDED)], demand(0, over=True), before=seen(pod(0)))

    assert ([e.uid for e in suspended.end], suspended.make) == ([uid(0), uid(1)], ())
    assert (over.end, over.make) == ((), ())


def test_places_beyond_the_budget_stay_empty_until_the_window_has_moved_on() -> None:
    policy = RepairPolicy(max_repairs=2, window_s=100.0)
    lost = pod(0, phase=PodPhase.FAILED, failure="code 1")

    def made(*counted: float) -> Repair:
        return repair([lost], demand(3, 0), before=seen(pod(0)), policy=policy, counted=counted)

    assert made(NOW_S - 50).make == (1, 2, 3)
    held = made(NOW_S - 60, NOW_S - 50)
    assert (held.make, held.counts.not_made) == ((1, 2), 1)
    assert "maxRepairs is 2" in held.reason
    assert made(NOW_S - 150, NOW_S - 140).counts.not_made == 0


def test_a_loss_that_was_counted_is_not_counted_again() -> None:
    policy = RepairPolicy(max_repairs=1)
    lost = pod(0, phase=PodPhase.FAILED, failure="code 1")
    again = {"before": seen(pod(0)), "policy": policy, "counted": [NOW_S]}

    assert repair([lost], demand(1), **again, accounted={uid(0)}).counts.not_made == 0
    assert repair([lost], demand(1, 0), **again).counts.not_made == 1


def test_a_pod_that_was_to_leave_anyway_burns_no_budget_though_it_fails() -> None:
    failed = pod(0, phase=PodPhase.FAILED, failure="code 1")
    policy = RepairPolicy(max_repairs=0)

    def not_made(wanted: PodDemand, **fields: Any) -> int:
        return repair(
            [failed], wanted, before=seen(pod(0)), policy=policy, **fields
        ).counts.not_made

    assert not_made(demand(1, 0)) == 1
    assert not_made(demand(1, 0, leaving=frozenset({uid(0)}))) == 0
    # The api names it no more once it is known to be gone.
    assert not_made(demand(1), leaving=frozenset({uid(0)})) == 0


def test_preemption_and_drain_never_use_the_budget_up() -> None:
    policy = RepairPolicy(max_repairs=0)
    gone = [pod(i, phase=PodPhase.FAILED, disruption=Disruption.EVICTED) for i in range(20)]

    done = repair(gone, demand(20), before=seen(*(pod(i) for i in range(20))), policy=policy)

    assert len(done.make) == 20


def test_a_pod_whose_node_alone_cannot_pull_the_image_is_replaced() -> None:
    stuck = pod(1, ready=False, stuck="ImagePullBackOff", stuck_on_image=True)

    (end,) = repair([pod(0), stuck], demand(2, 0)).end
    assert end.uid == uid(1)
    ended = pod(1, ready=False, ended_for=end.why, ended_as=end.cause)
    (loss,) = repair([pod(0)], demand(2, 0), before=seen(pod(0), ended)).losses
    assert (loss.cause, loss.counts) == (LossCause.IMAGE, True)
    first = pod(0, ready_since_s=NOW_S - 1)
    assert repair([first, stuck], demand(2, 0)).end == ()
    nobody = pod(0, ready=False, stuck="ImagePullBackOff", stuck_on_image=True)
    assert repair([nobody, stuck], demand(2)).end == ()


def test_force_is_used_only_if_asked_for_and_after_the_api_gave_the_pod_up() -> None:
    late = pod(0, terminating=True, ends_by_s=NOW_S - 100)
    nodes = {"n0": ObservedNode(name="n0", ready=False)}
    policy = RepairPolicy(force_delete_s=60)

    def forced(wanted: PodDemand, policy: RepairPolicy, **fields: ObservedNode) -> list[PodUid]:
        done = repair([late], wanted, nodes={**nodes, **fields}, policy=policy)
        return [e.uid for e in done.end if e.force]

    assert forced(demand(1), policy) == [uid(0)]
    assert forced(demand(1), RepairPolicy()) == []
    assert forced(demand(1, 0), policy) == []
    assert forced(demand(1), policy, n0=ObservedNode(name="n0")) == []


def test_a_few_failed_pods_stay_for_their_logs() -> None:
    failed = [
        pod(i, phase=PodPhase.FAILED, failure="code 1", created_at_s=i)
        for i in range(KEEP_FAILED + 2)
    ]

    done = repair([*failed, pod(9, phase=PodPhase.SUCCEEDED)], demand(1))

    assert {e.uid for e in done.end} == {uid(0), uid(1), uid(9)}


@given(st.sets(st.integers(0, 30)), st.integers(0, 20))
def test_free_indexes_are_the_smallest_ones(used: set[int], num: int) -> None:
    found = free_indexes(used, num)

    everything = [i for i in range(60) if i not in used]
    assert list(found) == everything[:num]


PODS = st.builds(
    lambda index, phase, terminating, ready, cordoned: pod(
        index,
        phase=phase,
        ready=ready,
        terminating=terminating,
        ends_by_s=NOW_S if terminating else 0.0,
        failure="code 1" if phase is PodPhase.FAILED else "",
        node="bad" if cordoned else "good",
    ),
    st.integers(0, 12),
    st.sampled_from(PodPhase),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(
    pods=st.lists(PODS, max_size=10, unique_by=lambda p: p.index),
    living=st.sets(st.integers(0, 14)),
    leaving=st.sets(st.integers(0, 14)),
    ending=st.sets(st.integers(0, 14)),
    num_pods=st.integers(0, 12),
)
def test_a_repair_that_was_carried_out_leaves_nothing_to_make(
    pods: list[ObservedPod], living: set[int], leaving: set[int], ending: set[int], num_pods: int
) -> None:
    nodes = {"good": ObservedNode(name="good"), "bad": ObservedNode(name="bad", cordoned=True)}
    wanted = demand(
        num_pods,
        *living,
        leaving=frozenset(uid(i) for i in leaving & living),
        ending=tuple(uid(i) for i in sorted(ending & living)),
    )
    done = repair(pods, wanted, nodes=nodes)
    indexes = [p.index for p in pods]

    assert not set(done.make) & set(indexes)
    assert len(set(done.make)) == len(done.make)
    assert {e.uid for e in done.end} <= {p.uid for p in pods}
    assert all(not p.terminating for p in pods if p.uid in {e.uid for e in done.end})
    # Nobody who serves is ended unless the api says so, or it is no more.
    kept = {p.uid for p in pods if p.uid in wanted.living and p.uid not in wanted.ending}
    assert not {e.uid for e in done.end} & {p.uid for p in pods if p.uid in kept and not p.ended}

    ended = {e.uid for e in done.end}
    after = [p for p in pods if p.uid not in ended]
    after += [pod(100 + i, uid=PodUid(f"new{i}"), node="good") for i in range(len(done.make))]
    again = repair(after, wanted, nodes=nodes)

    assert again.make == ()


def test_the_demand_is_read_from_the_api_s_reply() -> None:
    pods = [{"uid": "a", "name": "demo-0", "serving": True, "leaving": ""}]
    pods.append({"uid": "b", "name": "demo-1", "serving": False, "leaving": ""})
    reply = {"state": "running", "num_pods": 3, "leaving": ["b"], "ending": ["b"], "pods": pods}

    demand = demand_of(codec.decode(PodsPage, reply))

    assert (demand.num_pods, demand.serving, demand.over) == (3, 1, False)
    assert demand.living == {"a": "demo-0", "b": "demo-1"}


@pytest.mark.parametrize("state", ["complete", "failed", "stopped"])
def test_a_job_that_has_ended_is_over(state: str) -> None:
    reply = {"state": state, "num_pods": 0, "leaving": [], "ending": []}

    demand = demand_of(codec.decode(PodsPage, reply))

    assert demand.over
    assert not demand.suspended


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"phase": PodPhase.FAILED, "failure": "x"}, LossCause.FAILED),
        ({"phase": PodPhase.FAILED, "failure": "x", "ended_for": "scaled"}, LossCause.ENDED),
        ({"phase": PodPhase.SUCCEEDED}, LossCause.LEFT),
    ],
)
def test_whoever_saw_the_processes_end_says_it_in_other_words(
    fields: dict[str, Any], cause: LossCause
) -> None:
    ended = pod(0, evidence="its supervisor (pid 7) ended by signal 9", **fields)

    done = repair([ended], demand(1, 0), before=seen(pod(0)))

    assert [loss.cause for loss in done.losses] == [cause]
    assert [fact.evidence for fact in done.tell] == ["its supervisor (pid 7) ended by signal 9"]
