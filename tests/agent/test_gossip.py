"""Plans from supervisor to supervisor, and what a supervisor tells an api that has lost the job."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

from tests.agent.test_supervisor import LEDGER, plan

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, PodUid, QuorumId, Slot
from mainstay_core.wire.facts import FactKind, PodRegistration
from mainstay_core.wire.plan import Member, Plan, Rendezvous
from mainstay_train.comm.gather_client import GatherClient


def hosted(number: int, registrations: list[PodRegistration]) -> Plan:
    """A plan that says where these pods can be met."""
    hosts = tuple(Rendezvous(pod=r.pod, gather=r.gather) for r in registrations)
    return replace(plan(number), hosts=hosts)


def test_neighbours_are_at_distances_that_double() -> None:
    hosts = tuple(Rendezvous(pod=PodUid(f"p{i}"), gather=f"h{i}:1") for i in range(10))
    ten = replace(plan(1), hosts=hosts)
    assert ten.neighbours(PodUid("p0")) == ["h1:1", "h2:1", "h4:1", "h8:1"]
    assert ten.neighbours(PodUid("p7")) == ["h8:1", "h9:1", "h1:1", "h5:1"]
    assert ten.neighbours(PodUid("a-spare"))[:2] == ["h0:1", "h1:1"]
    assert replace(ten, hosts=hosts[:1]).neighbours(PodUid("p0")) == []


def test_every_pod_is_reached_from_every_other() -> None:
    for size in range(1, 40):
        hosts = tuple(Rendezvous(pod=PodUid(f"p{i}"), gather=f"h{i}:1") for i in range(size))
        one = replace(plan(1), hosts=hosts)
        reached, rounds = {f"h{size // 2}:1"}, 0
        while len(reached) < size:
            rounds += 1
            for address in tuple(reached):
                pod = PodUid("p" + address[1:-2])
                reached |= set(one.neighbours(pod))
        assert rounds <= size.bit_length()


def test_a_plan_that_one_supervisor_got_reaches_all_without_the_api(
    api: Any, make_pod: Any
) -> None:
    pods = [make_pod() for _ in range(4)]
    trainers = [pod.trainer(pod.launcher())[0] for pod in pods]
    registrations = [codec.decode(PodRegistration, api.next("pods")) for _ in pods]
    for _ in pods:
        api.next("stream")
    # One of the four streams takes it; then there is no api any more.
    api.push("plan", codec.encode(hosted(2, registrations)))
    told: queue.Queue[int] = queue.Queue()
    while told.empty():
        for pod in pods:
            if "q2-a" in pod.log:
                told.put(2)
    api.close()
    for trainer in trainers:
        assert trainer.expect("plan")["plan"]["quorum"]["id"] == 2


def test_a_member_that_joins_an_older_quorum_is_given_the_newer_plan(
    api: Any, make_pod: Any
) -> None:
    api.plan = codec.encode(plan(5))
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    registration = codec.decode(PodRegistration, api.next("pods"))
    trainer.expect("plan")
    given: queue.Queue[Any] = queue.Queue()
    member = GatherClient(registration.gather, "q3-a", 0, 2, "life", "127.0.0.1", on_plan=given.put)
    assert codec.decode(Plan, given.get()) == plan(5)
    assert member.ended is None, "what that means is for the member to decide"
    member.close()


def test_a_plan_that_a_trainer_got_from_elsewhere_is_its_supervisors_too(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    trainer.send(kind="plan", plan=codec.encode(replace(plan(8), job="another")))
    trainer.send(kind="plan", plan=codec.encode(plan(7)))
    assert trainer.expect("plan")["plan"]["quorum"]["id"] == 7
    while api.next("heartbeats")["quorum"] != {"id": 7, "nonce": "a"}:
        pass


def test_an_api_that_lost_the_job_is_told_all_that_is_held(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, life = pod.trainer(pod.launcher())
    api.next_fact("trainer-up")
    slot = Slot(pod=PodUid(pod.uid), index=0)
    held = plan(3)
    member: Member = replace(held.members[0], slot=slot, incarnation=Incarnation(life))
    held = replace(held, members=(member,))
    api.push("plan", codec.encode(held))
    trainer.expect("plan")
    trainer.send(kind="ledger", entry=codec.encode(LEDGER), post=False)
    trainer.send(
        kind="status", phase="voting", waiting=True, step=4, progress=9,
        quorum={"id": 3, "nonce": "a"},
    )  # fmt: skip
    while api.next("heartbeats")["slots"][0]["phase"] != "voting":
        pass
    lost = (404, {"error": "unknown-job"})
    restored = {
        "config": codec.encode(api.config),
        "plan": codec.encode(held),
        "cursor": "0-8",
        "restored_at_s": 12.5,
    }
    api.answers["pods"] = [lost, (200, restored)]
    api.heartbeat["restored_at_s"] = 12.5
    api.answers["heartbeats"] = [lost]
    told = api.next("restore")
    assert codec.decode(Plan, told["plan"]) == held
    assert told["config"] == codec.encode(api.config)
    assert (told["pod"], told["step"], told["fingerprint"]) == (pod.uid, 4, {"torch": "2"})
    assert api.next_fact("trainer-up").incarnation == life
    assert api.next("ledger")["entries"] == [codec.encode(LEDGER)]


def test_a_store_that_is_behind_is_told_before_the_fact_is_told_again(
    api: Any, make_pod: Any
) -> None:
    api.plan = codec.encode(plan(3))
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    api.next_fact("trainer-up")
    trainer.expect("plan")
    behind = (409, {"error": "store-behind", "detail": "you hold q3-a, the store has q2-b"})
    api.answers["facts"] = [behind]
    api.answers["pods"] = [behind]
    trainer.socket.close()
    told = api.next("restore")
    assert told["plan"]["quorum"] == {"id": 3, "nonce": "a"}
    facts = [api.next_fact("trainer-down") for _ in range(2)]
    assert {fact.incarnation for fact in facts} == {life}


def test_last_words_are_told_again_after_a_restore(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    fact = {
        "kind": FactKind.FINISHED,
        "pod": pod.uid,
        "slot": 0,
        "incarnation": life,
        "quorum": codec.encode(QuorumId(id=3, nonce="a")),
    }
    trainer.send(kind="fact", fact=fact)
    api.next_fact("finished")
    api.heartbeat["restored_at_s"] = 1.0
    api.answers["pods"] = [
        (200, {"config": codec.encode(api.config), "plan": None, "restored_at_s": 1.0})
    ]
    assert api.next_fact("finished").incarnation == life


def test_a_second_api_is_asked_when_the_first_does_not_answer(api: Any, make_pod: Any) -> None:
    pod = make_pod(url=f"http://127.0.0.1:9,{api.url}/")
    pod.launcher().expect("fork")
    assert api.next("stream")["last-event-id"] == "0-7"
