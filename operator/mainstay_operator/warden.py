"""Watches which nodes compute wrongly, and carries out a job's quarantine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.base.ids import PodUid
from mainstay_core.pool.observed import SeenPod
from mainstay_core.pool.quarantine import QuarantineMode, plan_quarantine
from mainstay_operator import quarantine
from mainstay_operator.actuator import Hands
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.resources import JobView

MAX_KNOWN_PODS = 8192
"""Pods whose node is remembered, those that are gone among them."""


class Warden:
    """Of one job.

    Args:
        status: of the job: what an operator before this one has learnt.
        pods: what is known of the job's pods.
        hands: acts in the cluster.
    """

    def __init__(self, status: Mapping[str, Any], pods: PodCache, hands: Hands) -> None:
        self.ward = quarantine.of_status(status)
        self._pods = pods
        self._hands = hands
        self._known: dict[PodUid, SeenPod] = {}
        self._untainted: tuple[str, ...] = ()
        self._spared: tuple[tuple[str, str], ...] = ()
        """Offenders beyond the limit, as they were told of."""

    def note_places(self) -> None:
        """Remember where pods run: the recovery that one causes is told when it may be gone."""
        self._known.update({p.uid: p for p in self._pods.list() if p.node})
        while len(self._known) > MAX_KNOWN_PODS:
            del self._known[next(iter(self._known))]

    async def judge(
        self, view: JobView, recoveries: Sequence[Mapping[str, Any]], now_s: float
    ) -> None:
        """Learn from recoveries which nodes computed wrongly, and review them."""
        found = quarantine.read_mismatches(recoveries, self._known)
        self.ward = self.ward.with_mismatches(found)
        await self.review(view, now_s)

    async def review(self, view: JobView, now_s: float) -> None:
        """Put nodes that computed wrongly again and again in quarantine, and take out those that
        the job's specification lets out.
        """
        self.note_places()
        if not self.ward.mismatches and not self.ward.nodes:
            return
        policy = quarantine.policy_of(view)
        nodes = {p.node for p in self._pods.list() if p.node}
        plan = plan_quarantine(self.ward, nodes, policy, now_s)
        self.ward = plan.ward
        out = {q.node for q, _ in plan.released}
        self._untainted = tuple(node for node in self._untainted if node not in out)
        if policy.mode is QuarantineMode.TAINT:
            self._untainted += tuple(q.node for q in plan.new)
        new_limits = tuple(spared for spared in plan.spared if spared not in self._spared)
        self._spared = plan.spared
        told = replace(plan, spared=new_limits)
        await self._hands.tell(view, quarantine.of_plan(told, policy.mode))

    async def taint(self) -> None:
        """Taint what came into quarantine; what does not succeed is tried again at the next look.

        Raises:
            KubeError: the API server refused, or did not answer.
        """
        for node in self._untainted:
            await self._hands.taint_node(node, quarantine.TAINT_KEY, quarantine.TAINT_EFFECT)
            self._untainted = tuple(n for n in self._untainted if n != node)
