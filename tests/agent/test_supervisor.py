"""The supervisor as a process: the test plays api, launcher and trainers over real sockets."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from tests.core.dmr.test_flips import FOUND

from mainstay_core.base import codec
from mainstay_core.base.ids import Incarnation, JobUid, PodUid, QuorumId, RankId, Slot
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.faults.points import FaultAction, FaultPoint
from mainstay_core.gather.client import QuorumAborted
from mainstay_core.wire.facts import Parked, PodRegistration
from mainstay_core.wire.ledger import LedgerEntry
from mainstay_core.wire.plan import Chain, Member, Method, Plan, Rendezvous
from mainstay_train.base.settings import TrainerSettings
from mainstay_train.comm.gather_client import GatherClient

LEDGER = LedgerEntry(
    step=3,
    stage=0,
    quorum=QuorumId(id=1, nonce="a"),
    gradient="g",
    masters="m",
    data="d",
    loss=1.0,
    norm=1.0,
    tokens=10,
    step_s=0.1,
    replicas=1,
)


def plan(number: int, life: str = "x") -> Plan:
    quorum = QuorumId(id=number, nonce="a")
    member = Member(
        index=0,
        rank=RankId(replica=0, stage=0),
        slot=Slot(pod=PodUid("p"), index=0),
        incarnation=Incarnation(life),
        address="127.0.0.1",
        since=number,
    )
    return Plan(
        job=JobUid("job-1"),
        quorum=quorum,
        planned=False,
        unplanned_id=number,
        method=Method.START,
        members=(member,),
        chains=(Chain(replica=0, cells=(0,), formed_in=quorum),),
        suppliers=(0,),
        all_reduce_stack=1,
        rendezvous=Rendezvous(pod=PodUid("p"), gather="127.0.0.1:1"),
        reason="a test",
    )


def parked(pod: Any, life: str, number: int) -> dict[str, Any]:
    fact = Parked(
        pod=PodUid(pod.uid),
        slot=0,
        incarnation=Incarnation(life),
        quorum=QuorumId(id=number, nonce="a"),
    )
    return codec.encode(fact)  # type: ignore[no-any-return]


def test_it_registers_when_the_launcher_is_there_and_forks_what_the_job_says(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod(num_slots=2)
    launcher = pod.launcher()
    registration = codec.decode(PodRegistration, api.next("pods"))
    assert (registration.pod, registration.num_slots) == (pod.uid, 2)
    assert registration.pid == pod.process.pid
    forks = [launcher.expect("fork") for _ in range(2)]
    settings = codec.decode(TrainerSettings, forks[1]["settings"])
    assert settings.config == api.config
    assert (settings.slot, settings.incarnation) == (1, forks[1]["incarnation"])
    assert settings.socket == pod.socket


def test_it_waits_for_an_api_that_is_not_there_yet(api: Any, make_pod: Any) -> None:
    api.answers["pods"] = [(503, {}), (500, {}), (401, {})]
    launcher = make_pod().launcher()
    launcher.expect("fork")
    assert api.inbox("pods").qsize() == 4


def test_a_trainer_is_announced_and_gets_the_plan_that_is_in_force(api: Any, make_pod: Any) -> None:
    api.plan = codec.encode(plan(4))
    pod = make_pod()
    trainer, life = pod.trainer(pod.launcher())
    fact = api.next_fact("trainer-up")
    assert (fact.slot, fact.incarnation, fact.fingerprint) == (0, life, {"torch": "2"})
    assert codec.decode(Plan, trainer.expect("plan")["plan"]) == plan(4)


def test_plans_of_the_stream_reach_every_trainer_and_old_ones_none(api: Any, make_pod: Any) -> None:
    pod = make_pod(num_slots=2)
    launcher = pod.launcher()
    trainers = [pod.trainer(launcher, slot)[0] for slot in range(2)]
    for _ in range(2):
        api.next_fact("trainer-up")
    for number, event_id in ((2, "2-0"), (1, "3-0"), (3, "4-0")):
        api.push("plan", codec.encode(plan(number)), event_id)
    for trainer in trainers:
        numbers = [trainer.expect("plan")["plan"]["quorum"]["id"] for _ in range(2)]
        assert numbers == [2, 3]


def test_the_stream_goes_on_where_it_broke_off(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    assert api.next("stream")["last-event-id"] == "0-7", "the registration's cursor"
    assert api.inbox("stream").empty()
    api.push("plan", codec.encode(plan(2)), "9-1")
    trainer.expect("plan")
    api.stream.put(None)
    headers = api.next("stream")
    assert headers["last-event-id"] == "9-1"
    assert headers["authorization"] == "Bearer secret"


def test_a_plan_that_the_stream_missed_is_fetched_when_a_heartbeat_names_it(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    api.plan = codec.encode(plan(6))
    api.heartbeat["quorum"] = {"id": 6, "nonce": "a"}
    assert trainer.expect("plan")["plan"]["quorum"]["id"] == 6


def test_heartbeats_carry_what_the_trainers_say_of_themselves(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, life = pod.trainer(pod.launcher())
    trainer.send(
        kind="status", phase="reducing", waiting=True, step=12, progress=99,
        quorum={"id": 3, "nonce": "a"},
    )  # fmt: skip
    while (slot := api.next("heartbeats")["slots"][0])["phase"] != "reducing":
        pass
    assert (slot["incarnation"], slot["step"], slot["progress"]) == (life, 12, 99)
    assert slot["waiting"] is True
    assert slot["quorum"] == {"id": 3, "nonce": "a"}


def test_the_end_of_a_socket_is_told_before_the_launcher_reaps_and_the_slot_is_forked_again(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    trainer.socket.close()
    fact = api.next_fact("trainer-down")
    assert (fact.slot, fact.incarnation, fact.restarting) == (0, life, True)
    assert launcher.expect("signal")["signal"] == signal.SIGKILL
    launcher.send(kind="exited", slot=0, pid=7, incarnation=life, code=None, signal=9)
    _, second = pod.trainer(launcher)
    assert second != life
    assert api.next_fact("trainer-up").incarnation == second


def test_a_fact_is_repeated_until_the_api_has_heard_it_and_keeps_its_place(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    api.next("pods")
    api.answers["facts"] = [(503, {})] * 3
    trainer, life = pod.trainer(launcher)
    trainer.send(kind="fact", fact=parked(pod, life, 1))
    trainer.socket.close()
    kinds: list[list[str]] = []
    while not kinds or kinds[-1][-1] != "trainer-down":
        kinds.append([fact.kind for fact in api.next_facts()])
    whole = ["trainer-up", "parked", "trainer-down"]
    assert all("trainer-up" in kind for kind in kinds[:4])
    flat = [kind for post in kinds for kind in post]
    assert list(dict.fromkeys(flat)) == whole


def test_a_parked_quorum_is_told_again_until_a_newer_plan_is_there(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, life = pod.trainer(pod.launcher())
    api.push("plan", codec.encode(plan(1)))
    trainer.expect("plan")
    trainer.send(kind="fact", fact=parked(pod, life, 1))
    for _ in range(3):
        assert api.next_fact("parked").quorum == QuorumId(id=1, nonce="a")
    api.answers["facts"] = [(409, {"error": "stale", "plan": codec.encode(plan(2))})]
    assert trainer.expect("plan")["plan"]["quorum"]["id"] == 2, "the refusal carried it"


def test_one_refused_fact_does_not_take_the_others_along(api: Any, make_pod: Any) -> None:
    def refuse_parked(body: Any) -> tuple[int, dict[str, Any]]:
        if len(body["facts"]) < 3 and not heard:
            return 503, {}
        if any(fact["kind"] == "parked" for fact in body["facts"]):
            heard.append("refused")
            return 409, {"error": "stale"}
        heard.extend(fact["kind"] for fact in body["facts"])
        return 200, {}

    heard: list[str] = []
    api.rules["facts"] = refuse_parked
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    trainer.send(kind="fact", fact=parked(pod, life, 1))
    trainer.socket.close()
    while "trainer-down" not in heard:
        api.next("facts")
    assert heard == ["refused", "trainer-up", "refused", "trainer-down"]


def test_an_api_that_forgot_the_pod_is_told_of_it_and_its_trainers_again(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    pod.trainer(pod.launcher())
    api.next("pods")
    api.next_fact("trainer-up")
    api.answers["heartbeats"] = [(409, {"error": "unregistered", "detail": "who?"})]
    assert api.next("pods")["pod"] == pod.uid
    assert api.next_fact("trainer-up").slot == 0


def test_ledger_entries_are_mirrored_if_they_are_marked(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    for step in range(4):
        entry = codec.encode(replace(LEDGER, step=step))
        trainer.send(kind="ledger", entry=entry, post=step % 2 == 1)
    steps: list[int] = []
    while len(steps) < 2:
        steps += [entry["step"] for entry in api.next("ledger")["entries"]]
    assert steps == [1, 3]


def test_findings_are_told_with_their_trainer_and_number(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, incarnation = pod.trainer(pod.launcher())
    finding = codec.encode(replace(FOUND, slot=Slot(pod=PodUid(pod.uid), index=0)))
    trainer.send(kind="finding", finding=finding)
    trainer.send(kind="finding", finding=finding)
    told: list[dict[str, Any]] = []
    while len(told) < 2:
        told += api.next("findings")["findings"]
    assert [(one["incarnation"], one["number"]) for one in told] == [
        (incarnation, 0),
        (incarnation, 1),
    ]
    assert told[0]["finding"] == finding


def test_a_trainer_that_tells_a_finding_of_another_slot_is_cut_off(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    trainer.send(kind="finding", finding=codec.encode(FOUND))
    assert trainer.at_end()


def test_the_end_of_the_job_stops_the_trainers_then_the_launcher_then_itself(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    api.push("stop", {"state": "complete"})
    trainer.expect("stop")
    trainer.socket.close()
    assert launcher.expect("signal")["slot"] == 0
    launcher.send(kind="exited", slot=0, pid=7, incarnation=life, code=0, signal=None)
    launcher.expect("stop")
    assert pod.process.wait() == 0


def test_the_end_of_the_job_is_learnt_from_a_heartbeat_too(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    api.heartbeat["state"] = "failed"
    trainer.expect("stop")


def test_sigterm_hands_the_work_over_and_then_ends_the_pod(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    api.next_fact("trainer-up")
    (member,) = plan(1, life).members
    serving = replace(member, slot=Slot(pod=PodUid(pod.uid), index=0))
    api.push("plan", codec.encode(replace(plan(1), members=(serving,))))
    trainer.expect("plan")
    pod.process.terminate()
    fact = api.next_fact("leaving")
    assert (fact.pod, fact.grace_s) == (pod.uid, 30.0)
    pod.process.terminate()
    api.next_fact("leaving")
    # The plan that drops it is adopted by all at the end of a step; until then it serves.
    api.push("plan", codec.encode(plan(2)), "2-0")
    trainer.expect("plan")
    guest = GatherClient(api.next("pods")["gather"], "q1-a", 0, 2, "guest", "127.0.0.1")
    guest.post("vote", b"")
    quorum = {"id": 2, "nonce": plan(2).quorum.nonce}
    trainer.send(kind="status", phase="idle", waiting=True, step=3, progress=9, quorum=quorum)
    api.inbox("heartbeats").queue.clear()
    api.next("heartbeats")
    api.next("heartbeats")
    assert pod.process.poll() is None, "others still meet here"
    guest.leave()
    trainer.expect("stop")
    launcher.send(kind="exited", slot=0, pid=7, incarnation=life, code=0, signal=None)
    assert launcher.expect("stop")
    assert pod.process.wait() == 0


def test_sigterm_with_no_time_for_a_hand_over_ends_the_pod(api: Any, make_pod: Any) -> None:
    api.config = replace(api.config, handover_s=0.0)
    pod = make_pod()
    launcher = pod.launcher()
    trainer, life = pod.trainer(launcher)
    api.next_fact("trainer-up")
    pod.process.terminate()
    trainer.expect("stop")
    launcher.send(kind="exited", slot=0, pid=7, incarnation=life, code=0, signal=None)
    assert pod.process.wait() == 143
    assert launcher.expect("stop")


def test_without_its_parent_the_pod_ends(make_pod: Any) -> None:
    pod = make_pod(url="http://127.0.0.1:9")
    line = pod.connect()
    pod.process.stdin.close()
    assert pod.process.wait() == -signal.SIGKILL
    assert line.at_end()


def test_a_trainer_that_nobody_asked_for_is_cut_off(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    _, life = pod.trainer(launcher)
    for slot, incarnation in ((0, "impostor"), (0, life), (5, "impostor")):
        line = pod.connect()
        line.send(kind="hello", slot=slot, incarnation=incarnation, pid=1)
        assert line.at_end()


def test_who_breaks_the_protocol_is_cut_off_and_the_others_go_on(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    for head in ({"kind": "status"}, {"kind": "launcher-hello"}):
        line = pod.connect()
        line.send(**head)
        assert line.at_end()
    api.push("plan", codec.encode(plan(2)))
    trainer.expect("plan")


def test_quorums_gather_at_the_registered_address(api: Any, make_pod: Any) -> None:
    make_pod().launcher()
    address = api.next("pods")["gather"]
    members = [GatherClient(address, "q1-a", i, 2, f"l{i}", "127.0.0.1") for i in range(2)]
    for index, member in enumerate(members):
        member.post("vote", bytes([index]))
    assert members[0].wait("vote") == [b"\0", b"\1"]
    members[0].close()
    with pytest.raises(QuorumAborted):
        members[1].wait("next")
    members[1].close()


def test_a_fault_that_has_fired_before_lets_the_trainer_go_on(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    trainer, _ = pod.trainer(pod.launcher())
    api.answers["faults/f1/fired"] = [(409, {"error": "fired"})]
    trainer.send(kind="fault-point", fault="f1", action="kill-pod", delay_ms=0, step=4, rank="r0")
    assert trainer.expect("resume")["fault"] == "f1"
    body = api.next("faults/f1/fired")
    assert (body["pod"], body["slot"], body["rank"]) == (pod.uid, 0, "r0")


def test_a_sticky_flip_outlives_the_trainer_of_its_slot(api: Any, make_pod: Any) -> None:
    pod = make_pod(num_slots=2)
    launcher = pod.launcher()
    first, _ = pod.trainer(launcher, 0)
    flip = Flip(in_pass=Pass.FORWARD, element=0, bit=1, execution=Execution.BOTH, sticky=True)
    faults = [
        FaultPoint(id=name, step=3, action=FaultAction.FLIP, replica=0, stage=0, flip=one)
        for name, one in (("broken", flip), ("once", replace(flip, sticky=False)))
    ]
    api.push("faults", codec.encode(faults), "2-0")
    assert first.expect("faults")["sticky"] == []
    for name in ("broken", "once"):
        first.send(kind="fault-point", fault=name, action="flip", delay_ms=0, step=3, rank="r0")
        assert first.expect("resume")["fault"] == name
    other, _ = pod.trainer(launcher, 1)
    assert other.expect("faults")["sticky"] == []
    api.push("faults", codec.encode(faults), "3-0")
    assert first.expect("faults")["sticky"] == ["broken"]


def test_faults_that_a_running_job_is_given_reach_trainers_of_now_and_of_later(
    api: Any, make_pod: Any
) -> None:
    pod = make_pod(num_slots=2)
    launcher = pod.launcher()
    first, _ = pod.trainer(launcher, 0)
    fault = FaultPoint(id="f", step=3, action=FaultAction.KILL_POD, replica=0, stage=0)
    api.push("faults", codec.encode([fault]), "2-0")
    assert codec.decode(tuple[FaultPoint, ...], first.expect("faults")["faults"]) == (fault,)
    api.push("fired", {"fault": "f"}, "3-0")
    assert first.expect("fault-fired")["fault"] == "f"
    second, _ = pod.trainer(launcher, 1)
    assert [f["id"] for f in second.expect("faults")["faults"]] == ["f"]


def test_a_cut_network_ends_every_connection_and_comes_back(api: Any, make_pod: Any) -> None:
    pod = make_pod()
    launcher = pod.launcher()
    gather = codec.decode(PodRegistration, api.next("pods")).gather
    trainer, _ = pod.trainer(launcher)
    member = GatherClient(gather, "q1-a", 0, 2, "i", "127.0.0.1")
    member.post("key", b"")
    trainer.send(
        kind="fault-point", fault="f", action="disconnect", delay_ms=0, for_s=0.5, step=4, rank="r0"
    )
    assert trainer.expect("disconnect")["for_s"] == 0.5
    # Told of the cut before it goes on: it reaches nobody from here on.
    trainer.expect("resume")
    with pytest.raises(QuorumAborted):
        member.wait("key")
    member.close()
    # The stream and the heartbeats are back after it, and rooms may meet here.
    first = api.next("stream")
    assert api.next("stream") is not first
    while not api.inbox("heartbeats").empty():
        api.next("heartbeats")
    api.next("heartbeats")
    again = GatherClient(gather, "q2-a", 0, 1, "i", "127.0.0.1")
    again.post("key", b"here")
    assert again.wait("key") == [b"here"]
    again.close()


# With real launchers and trainers: their pids are killed.


def bring_up(api: Any, pod: Any, forge: Any, *args: str) -> int:
    api.config = replace(api.config, args=args, max_restarts=2)
    return int(forge.launch(pod))


def exit_of(forge: Any) -> int:
    return int(forge.line.expect("exited")["code"])


def reach(api: Any, pod: Any, fault: str) -> Any:
    api.push("inject", {"id": fault, "step": 1, "action": fault, "pod": pod.uid})
    return api.next(f"faults/{fault}/fired")


def test_kill_trainer_kills_the_process_and_another_life_takes_the_slot(
    api: Any, make_pod: Any, forge: Any
) -> None:
    pod = make_pod()
    bring_up(api, pod, forge, "wait")
    first = api.next_fact("trainer-up")
    assert reach(api, pod, "kill-trainer")["slot"] == 0
    down = api.next_fact("trainer-down")
    assert (down.incarnation, down.restarting) == (first.incarnation, True)
    assert api.next_fact("trainer-up").incarnation != first.incarnation
    api.push("stop", {"state": "complete"})
    assert pod.process.wait() == 0
    assert exit_of(forge) == 0


def test_kill_pod_leaves_nothing_of_the_pod(api: Any, make_pod: Any, forge: Any) -> None:
    pod = make_pod()
    bring_up(api, pod, forge, "wait")
    api.next_fact("trainer-up")
    reach(api, pod, "kill-pod")
    assert pod.process.wait() == -signal.SIGKILL
    assert exit_of(forge) == -signal.SIGKILL


def test_a_stopped_trainer_is_seen_in_the_heartbeat_and_killed_for_its_silence(
    api: Any, make_pod: Any, forge: Any
) -> None:
    api.config = replace(api.config, heartbeat_timeout_s=1.0)
    pod = make_pod()
    bring_up(api, pod, forge, "status")
    api.next_fact("trainer-up")
    reach(api, pod, "stop")
    while api.next("heartbeats")["slots"][0]["phase"] != "stopped":
        pass
    assert "no sign of life" in api.next_fact("trainer-down").evidence
    api.push("stop", {"state": "complete"})
    assert pod.process.wait() == 0
    assert exit_of(forge) == 0


def test_a_trainer_that_is_stopped_for_a_while_goes_on(api: Any, make_pod: Any, forge: Any) -> None:
    pod = make_pod()
    bring_up(api, pod, forge, "status")
    api.next_fact("trainer-up")
    api.push(
        "inject", {"id": "s", "step": 1, "action": "stop", "pod": pod.uid, "for_s": 0.5}, "2-0"
    )
    api.next("faults/s/fired")
    while api.next("heartbeats")["slots"][0]["phase"] != "stopped":
        pass
    while api.next("heartbeats")["slots"][0]["phase"] == "stopped":
        pass
    api.push("stop", {"state": "complete"}, "3-0")
    assert pod.process.wait() == 0
    assert exit_of(forge) == 0


def test_a_trainer_with_a_user_error_is_not_restarted(api: Any, make_pod: Any, forge: Any) -> None:
    pod = make_pod()
    bring_up(api, pod, forge, "exit:10")
    while (fact := api.next_fact("trainer-down")).restarting:
        pass
    api.push("stop", {"state": "failed"})
    assert pod.process.wait() == 0
    assert fact.incarnation is not None
    assert exit_of(forge) == 0


def test_without_the_supervisor_launcher_and_trainers_end(
    api: Any, make_pod: Any, forge: Any
) -> None:
    pod = make_pod()
    bring_up(api, pod, forge, "wait")
    api.next_fact("trainer-up")
    pod.process.kill()
    assert exit_of(forge) == 4
