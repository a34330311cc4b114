"""The pool in scenarios: which pods there should be, from what is wanted and what is seen.

Pods are called ``demo-0``, ``demo-1`` and have uids like ``demo-0.1``: the number counts the pods
that had the name. ``look`` asks for the repair and carries it out as a cluster
would: pods are made and start to end; ``pod`` and ``node`` say what is seen of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tests.scenarios.scenario_files import Call, Command, Driver

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.losses import PodDemand
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import (
    Disruption,
    ObservedNode,
    ObservedPod,
    PodPhase,
    Taint,
    Toleration,
)
from mainstay_core.pool.repair import Repair, RepairPolicy, plan_repair
from mainstay_core.wire.facts import Fact, Leaving


class PoolDriver(Driver):
    """A job's pods, their nodes, and what the api says of both."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._pods: dict[str, ObservedPod] = {}
        self._nodes: dict[str, ObservedNode] | None = None
        self._memory = PoolMemory()
        self._made: dict[str, int] = {}
        self._demand = PodDemand(num_pods=0)
        self._living: list[str] = []
        self._policy = RepairPolicy()
        self._names_once = False
        self._highest = 0

    def commands(self) -> dict[str, Command]:
        return {
            "policy": self._set_policy,
            "wanted": self._wanted,
            "registered": self._registered,
            "pods-run": self._pods_run,
            "pod": self._pod,
            "pod-vanishes": self._pod_vanishes,
            "node": self._node,
            "look": self._look,
            "tick": self._tick,
        }

    def _set_policy(self, call: Call) -> list[str]:
        usual = RepairPolicy()
        self._names_once = call.flag("names-once")
        self._policy = RepairPolicy(
            max_repairs=call.count("max-repairs", usual.max_repairs),
            window_s=math.inf if call.flag("no-window") else call.number("window", usual.window_s),
            stuck_image_s=call.number("stuck-image", usual.stuck_image_s),
            force_delete_s=call.number("force-delete", usual.force_delete_s),
            ignore_cordon=call.flag("ignore-cordon"),
        )
        return ["the policy is set"]

    def _wanted(self, call: Call) -> list[str]:
        """What the api says: how many pods, which of them leave, and which are to end now."""
        num_pods = int(call.word())
        over, suspended = call.flag("job-over"), call.flag("job-suspended")
        self._demand = PodDemand(
            num_pods=num_pods,
            over=over,
            suspended=suspended,
            leaving=frozenset(self._uid(call, name) for name in call.names("leaving")),
            ending=tuple(self._uid(call, name) for name in call.names("ending")),
            known=self._demand.known,
        )
        return ["the api says so"]

    def _registered(self, call: Call) -> list[str]:
        """The api takes these pods for living, and no others but those named before."""
        names = call.words()
        for name in names:
            self._uid(call, name)
        self._living += [name for name in names if name not in self._living]
        gone = call.names("gone")
        self._living = [name for name in self._living if name not in gone]
        return [f"the api takes for living: {', '.join(self._living) or 'no pod'}"]

    def _pods_run(self, call: Call) -> list[str]:
        """Pods are scheduled, each on the node of its number, run and are ready."""
        names = call.words()
        for name in names:
            node = call.get("node") or f"n{name.rpartition('-')[2]}"
            self._change(
                call,
                name,
                node=node,
                phase=PodPhase.RUNNING,
                ready=True,
                ready_since_s=self._now_s,
            )
        return [f"{', '.join(names)} run"]

    def _pod(self, call: Call) -> list[str]:
        """What is seen of one pod from now on."""
        name = call.word()
        seen: dict[str, Any] = {}
        self._uid(call, name)
        if call.flag("pending"):
            seen |= {"phase": PodPhase.PENDING, "ready": False}
        if call.flag("deleted"):
            grace_s = call.number("grace", 30.0)
            seen |= {"terminating": True, "ends_by_s": self._now_s + grace_s}
        if call.has("failed"):
            seen |= {"phase": PodPhase.FAILED, "ready": False, "failure": call.get("failed")}
        if call.has("saw"):
            seen |= {"evidence": call.get("saw"), "terminating": False, "ends_by_s": 0.0}
        if call.flag("out-of-memory"):
            seen |= {"out_of_memory": True}
        if call.flag("succeeded"):
            seen |= {"phase": PodPhase.SUCCEEDED, "ready": False}
        if call.has("disrupted"):
            seen |= {
                "disruption": Disruption(call.get("disrupted")),
                "disruption_why": call.get("why"),
            }
        if call.has("stuck-on-image"):
            seen |= {"stuck": call.get("stuck-on-image"), "stuck_on_image": True, "ready": False}
        if call.has("tolerates"):
            toleration = Toleration(key=call.get("tolerates"), operator="Exists")
            seen |= {"tolerations": (toleration,)}
        if not seen:
            raise call.error("nothing is said of the pod")
        self._change(call, name, **seen)
        return ["it is seen"]

    def _pod_vanishes(self, call: Call) -> list[str]:
        names = call.words()
        for name in names:
            self._uid(call, name)
            del self._pods[name]
        return [f"{', '.join(names)}: there is no such object any more"]

    def _node(self, call: Call) -> list[str]:
        name = call.word()
        taints = []
        for text in call.names("taints"):
            key, _, effect = text.rpartition(":")
            taints.append(Taint(key=key, effect=effect))
        self._nodes = {
            **(self._nodes or {}),
            name: ObservedNode(
                name=name,
                ready=not call.flag("not-ready"),
                not_ready_since_s=self._now_s,
                gone=call.flag("gone"),
                cordoned=call.flag("cordoned"),
                taints=tuple(taints),
            ),
        }
        return ["it is seen"]

    def _tick(self, call: Call) -> list[str]:
        self._now_s += float(call.word())
        return ["time passes"]

    def _look(self, call: Call) -> list[str]:
        """Ask what to do; then do it: pods that end are deleted, new ones are made."""
        restarted = call.flag("after-restart")
        demand = replace(
            self._demand,
            living={self._pods_uid(name): name for name in self._living},
            known=self._demand.known | {self._pods_uid(name) for name in self._living},
        )
        self._demand = replace(self._demand, known=demand.known)
        memory = replace(self._memory, before={}) if restarted else self._memory
        self._memory = memory.after_hearing(demand)
        repair = plan_repair(
            memory=self._memory,
            pods=self._pods.values(),
            nodes=self._nodes,
            demand=demand,
            taken=range(self._highest + 1) if self._names_once else (),
            policy=self._policy,
            now_s=self._now_s,
        )
        lines = self._say(repair)
        self._carry_out(repair)
        return lines

    def _say(self, repair: Repair) -> list[str]:
        lines = [repair.reason]
        for loss in repair.losses:
            counts = "counts" if loss.counts else "does not count"
            lines.append(f"* lost {loss.uid}, {loss.cause}, {counts}: {loss.evidence}")
        lines += [f"* tells the api {_say_fact(fact)}" for fact in repair.tell]
        for end in repair.end:
            lines.append(f"* ends {end.name}{' by force' if end.force else ''}: {end.why}")
        if repair.make:
            lines.append(f"* makes {', '.join(f'demo-{index}' for index in repair.make)}")
        return lines

    def _carry_out(self, repair: Repair) -> None:
        lost = {loss.uid for loss in repair.losses}
        self._memory, _ = self._memory.account(repair.losses)
        self._living = [name for name in self._living if self._pods_uid(name) not in lost]
        for end in repair.end:
            pod = self._pods[end.name]
            if pod.ended or end.force:
                del self._pods[end.name]
            else:
                self._pods[end.name] = replace(
                    pod,
                    terminating=True,
                    ends_by_s=self._now_s + 30,
                    ended_for=end.why,
                    ended_as=end.cause,
                )
        for index in repair.make:
            name = f"demo-{index}"
            self._made[name] = self._made.get(name, 0) + 1
            self._highest = max(self._highest, index)
            self._pods[name] = ObservedPod(
                uid=PodUid(f"{name}.{self._made[name]}"),
                name=name,
                index=index,
                created_at_s=self._now_s,
            )
        self._memory = self._memory.after_look(
            self._pods.values(), self._nodes, repair.losses, told=True
        )

    def _uid(self, call: Call, name: str) -> PodUid:
        if name not in self._pods:
            raise call.error(f"there is no pod {name}")
        return self._pods[name].uid

    def _pods_uid(self, name: str) -> PodUid:
        return PodUid(f"{name}.{self._made[name]}")

    def _change(self, call: Call, name: str, **seen: Any) -> None:
        self._uid(call, name)
        self._pods[name] = replace(self._pods[name], **seen)

    def show(self) -> list[str]:
        pods = ", ".join(f"{pod.name} {_say_pod(pod)}" for pod in self._pods.values())
        return [f"= at {self._now_s:g} s {pods or 'no pod'}"]


def _say_pod(pod: ObservedPod) -> str:
    if pod.ended:
        return pod.phase.lower()
    if pod.terminating:
        return "is ending"
    return "runs" if pod.ready else "starts"


def _say_fact(fact: Fact) -> str:
    grace_s = fact.grace_s if isinstance(fact, Leaving) else 0.0
    grace = f", within {grace_s:g} s" if grace_s else ""
    return f"{fact.kind} of {fact.pod}{grace}: {fact.evidence}"
