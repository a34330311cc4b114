"""One job: looks at what is wanted and what is, again and again, and makes them agree.

Level-triggered: every look starts from the whole of what is known, so an event
that was lost, or an operator that was away, costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mainstay_core.pool.conditions import JobSeen
from mainstay_core.pool.counts import count_pods, find_problems
from mainstay_core.pool.losses import Loss, Wishes, find_losses
from mainstay_core.pool.observed import SeenNode
from mainstay_core.pool.repair import Repair, plan_repair
from mainstay_operator import (
    finalizer,
    narrator,
    quarantine,
    submission,
)
from mainstay_operator import (
    status as status_values,
)
from mainstay_operator.actuator import Hands, NameTakenError
from mainstay_operator.api_client import ApiError, ApiLine
from mainstay_operator.events import Note
from mainstay_operator.kube import KubeError
from mainstay_operator.liveness import RunningLook
from mainstay_operator.metrics import POD_STATES, Journal
from mainstay_operator.observed import job_of, see_pod
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.quarantine import Warden
from mainstay_operator.resources import FINALIZER, LABEL_UID, JobView
from mainstay_operator.settings import Settings
from mainstay_operator.state import Memory
from mainstay_operator.status import PodRecord

logger = logging.getLogger(__name__)

COALESCE_S = 0.05
"""Events that come so close together are one look."""
OBJECTS_EVERY = 10
"""Looks at everything between two applies of objects that nobody is known to have changed."""
MAX_BACKOFF_S = 30.0
EVENTS_OLD_S = 900.0
"""What happened so long before the operator came is not told again."""


class Keeper:
    """Keeps one job.

    Args:
        view: the job.
        pods: what is known of its pods.
        nodes: returns the nodes by name, None if they are not watched.
        hands: acts in the cluster.
        api: line to the api.
        settings: of the operator.
        journal: notes what is done.
    """

    def __init__(
        self,
        view: JobView,
        *,
        pods: PodCache,
        nodes: Callable[[], Mapping[str, SeenNode] | None],
        hands: Hands,
        api: ApiLine,
        settings: Settings,
        journal: Journal,
    ) -> None:
        self.view = view
        self.pods = pods
        self._nodes = nodes
        self._hands = hands
        self._api = api
        self._settings = settings
        self._journal = journal
        self._wake = asyncio.Event()
        self._memory = Memory(record=PodRecord.of_status(view.status), status=view.status)
        self._warden = Warden(view.status, pods, hands)
        self._started_s = time.time()
        self._began_s: float | None = None
        self.looked_at_s = time.monotonic()
        """Monotonic clock of the last finished look, or of the start."""

    def update(self, view: JobView) -> None:
        """Learn that the job's object has changed."""
        # Its status is ours: what comes back by the watch may be older than what was written.
        self.view = view
        self.wake()

    def wake(self) -> None:
        """Look again soon."""
        self._wake.set()

    def running_look(self) -> RunningLook | None:
        """Return the look that has not ended yet, if there is one."""
        if self._began_s is None:
            return None
        wishes = self._memory.wishes
        return RunningLook(
            job=f"{self.view.namespace}/{self.view.name}",
            since_s=self._began_s,
            num_pods=wishes.num_pods if wishes is not None else 0,
        )

    async def run(self) -> None:
        """Keep the job until it is no more."""
        failures = 0
        while True:
            self._wake.clear()
            self._began_s, result = time.monotonic(), "crashed"
            try:
                done = await self.look()
                failures, result = 0, "done"
            except KubeError as error:
                failures += 1
                done, result = False, "refused"
                logger.warning("%s/%s: %s", self.view.namespace, self.view.name, error)
            except asyncio.CancelledError:
                result = "stopped"
                raise
            finally:
                self._journal.note_look(result, self._began_s)
                self._began_s, self.looked_at_s = None, time.monotonic()
            if done:
                return
            pause_s = self._pause_s() if not failures else min(MAX_BACKOFF_S, 0.5 * 2**failures)
            try:
                await asyncio.wait_for(self._wake.wait(), pause_s)
                await asyncio.sleep(COALESCE_S)
            except TimeoutError:
                pass

    def _pause_s(self) -> float:
        wishes = self._memory.wishes
        if wishes is not None and (wishes.over or wishes.suspended):
            return min(self._settings.resync_s, 10 * self._settings.poll_s)
        return self._settings.poll_s

    async def look(self) -> bool:
        """Make what is agree with what is wanted, once; return whether the job is no more."""
        view, memory = self.view, self._memory
        if view.deleted_at_s is not None:
            return await finalizer.let_go(view, self._api, self._hands, self._settings)
        if not view.ours:
            return False
        if FINALIZER not in view.finalizers:
            await self._hands.add_finalizer(view)
            if FINALIZER not in self.view.finalizers:
                self.view = replace(self.view, finalizers=(*self.view.finalizers, FINALIZER))
        if view.invalid:
            await self._write_status()
            return False
        now_s = time.time()
        late_s = OBJECTS_EVERY * self._settings.resync_s
        if now_s - memory.objects_at_s > late_s or memory.submitted != view.generation:
            await self._hands.keep_objects(view)
            memory.objects_at_s, memory.min_available = now_s, -1
        await self._resync(now_s)
        await self._tell_losses()
        await self._ask_api()
        if memory.wishes is not None and not memory.api_problem:
            await self._repair(memory.wishes)
        await self._keep_budget()
        await self._warden.review(view, now_s)
        await self._write_status()
        await self._warden.taint()
        return await finalizer.expire(view, memory.status, self._hands)

    # --- what is seen -----------------------------------------------------------------------------

    async def _resync(self, now_s: float) -> None:
        """Compare with a list what the watch has shown."""
        if now_s - self._memory.resync_at_s < self._settings.resync_s:
            return
        known = {p.uid for p in self.pods.list()}
        listed = await self._hands.kube.list(
            "pods", self.view.namespace, f"{LABEL_UID}={self.view.uid}"
        )
        ours = [see_pod(body) for body in listed if job_of(body) == self.view.uid]
        if self.pods.put_right(ours, known):
            logger.warning("%s: the watch has missed pods", self.view.name)
            self._journal.note_missed("pods")
        self._memory.resync_at_s = now_s

    async def _tell_losses(self) -> None:
        """Tell of pods that are gone at once, by what the api was last heard to want."""
        memory = self._memory
        words = self.pods.last_words
        memory.before |= {uid: pod for uid, pod in words.items() if uid in memory.before}
        words.clear()
        if memory.wishes is None:
            return
        losses = find_losses(
            memory.before, self.pods.list(), self._nodes(), memory.wishes, time.time()
        )
        facts = [loss.fact() for loss in losses if loss.uid in memory.wishes.living]
        if not facts:
            return
        try:
            await self._api.tell(self.view.uid, facts)
        except ApiError as error:
            logger.warning("%s: %s", self.view.name, error)
            return
        # Heard: the next wishes will not take them for living.
        memory.wishes_at_s = 0.0

    # --- the api ----------------------------------------------------------------------------------

    async def _ask_api(self) -> None:
        """Submit the job if it is due, pass on what was asked for, learn what is wanted."""
        memory, view = self._memory, self.view
        try:
            await submission.submit(view, memory, self._api)
            await submission.tell_topology(
                view,
                memory,
                self._api,
                pods=self.pods.list(),
                nodes=self._nodes(),
                again_s=self._settings.resync_s,
            )
            memory.deadline = memory.deadline or finalizer.find_deadline(
                view, memory.status, time.time()
            )
            if memory.deadline and not (memory.wishes is not None and memory.wishes.over):
                await self._api.ask(view.uid, "stop")
            if time.time() - memory.wishes_at_s >= self._settings.poll_s:
                wishes = status_values.read_wishes(await self._api.fetch(view.uid, "pods"))
                memory.known = (memory.known & {p.uid for p in self.pods.list()}) | {*wishes.living}
                memory.wishes = replace(wishes, known=frozenset(memory.known))
                memory.wishes_at_s = time.time()
            memory.api_problem = ""
            memory.unknown_since_s = 0.0
        except ApiError as error:
            memory.api_problem = str(error)
            if error.unknown_job:
                submission.note_unknown(memory, self.pods.list())

    # --- pods -------------------------------------------------------------------------------------

    async def _repair(self, wishes: Wishes) -> None:
        memory, view, now_s = self._memory, self.view, time.time()
        pods = self.pods.list()
        settings = self._settings
        counted = memory.record.counted_times()
        before = memory.before
        policy = view.repair_policy(
            force_delete_s=settings.force_delete_s,
            image_pull_s=settings.image_pull_s,
            ignore_cordon=settings.ignore_cordon,
        )
        repair = plan_repair(
            before=before,
            pods=pods,
            nodes=quarantine.without(self._nodes(), self._warden.ward),
            wishes=wishes,
            accounted=memory.accounted,
            taken=memory.taken,
            counted=counted,
            policy=policy,
            now_s=now_s,
        )
        if memory.repair is None or repair.reason != memory.repair.reason:
            logger.info("%s/%s: %s", view.namespace, view.name, repair.reason)
        memory.repair = repair
        notes = self._account(repair.losses)
        told = await self._tell_facts(repair)
        due = now_s >= memory.make_at_s
        make = repair.make if due else ()
        shunned = memory.record.nodes_without_image(pods, now_s - policy.window_s)
        options = self._hands.pod_options(self._warden.ward.avoided, shunned)
        made, errors = await self._hands.make_pods(view, make, options)
        self.pods.note_made(made)
        if due and repair.make:
            self._note_refusal(errors, now_s)
        memory.record = replace(memory.record, made=memory.record.made + len(made))
        errors += await self._hands.end_pods(view, repair.end)
        memory.taken |= {e.index for e in errors if isinstance(e, NameTakenError)}
        notes += narrator.of_repair(repair, made, errors)
        notes += narrator.of_container_ends(pods, memory.told_ends)
        lost = {loss.uid for loss in repair.losses}
        memory.before = {p.uid: p for p in [*pods, *made] if p.uid not in lost and not p.ended}
        if not told:
            memory.before |= {uid: before[uid] for uid in lost if uid in before}
        await self._hands.tell(view, notes)

    def _note_refusal(self, errors: Sequence[Exception], now_s: float) -> None:
        """Pods that are refused (quota, admission) are tried again ever later, and it is shown."""
        memory = self._memory
        refusals = [str(e) for e in errors if not isinstance(e, NameTakenError)]
        memory.make_problem = refusals[0] if refusals else ""
        memory.make_failures = memory.make_failures + 1 if refusals else 0
        pause_s = min(MAX_BACKOFF_S, 2.0**memory.make_failures) if refusals else 0.0
        memory.make_at_s = now_s + pause_s

    def _account(self, losses: tuple[Loss, ...]) -> list[Note]:
        """Count losses once, however often they are seen; return what to tell of them."""
        memory = self._memory
        if memory.wishes is not None and memory.wishes.over:
            return []  # they have done their work
        new = [loss for loss in losses if loss.uid not in memory.accounted]
        memory.record = memory.record.with_losses(new)
        memory.accounted |= {loss.uid for loss in new}
        self._journal.note_losses(new)
        return narrator.of_losses(new)

    async def _tell_facts(self, repair: Repair) -> bool:
        if not repair.tell:
            return True
        try:
            await self._api.tell(self.view.uid, repair.tell)
        except ApiError as error:
            self._memory.api_problem = str(error)
            return False
        self._memory.wishes_at_s = 0.0
        return True

    async def _keep_budget(self) -> None:
        """Have the PodDisruptionBudget follow the quorum."""
        memory = self._memory
        wishes = memory.wishes
        if wishes is None:
            return
        wanted = 0 if wishes.over or wishes.suspended else wishes.serving
        if wanted != memory.min_available:
            await self._hands.keep_disruption_budget(self.view, wanted)
            memory.min_available = wanted

    # --- status -----------------------------------------------------------------------------------

    async def _write_status(self) -> None:
        memory, now_s = self._memory, time.time()
        await self._learn_summary(now_s)
        seen = self._seen()
        counts = {state: getattr(seen.pods, state) for state in POD_STATES}
        self._journal.show_job(self.view.uid, self.view.namespace, self.view.name, counts)
        status = status_values.build_status(
            replace(self.view, status=dict(memory.status)),
            seen,
            memory.summary,
            memory.record,
            now_s,
        ) | quarantine.show(self._warden.ward)
        if status == memory.status:
            return
        due = now_s - memory.status_at_s >= self._settings.status_s
        if not due and not status_values.is_urgent(memory.status, status):
            return
        if await self._hands.write_status(self.view, status):
            memory.status, memory.status_at_s = status, now_s

    async def _learn_summary(self, now_s: float) -> None:
        memory = self._memory
        due = now_s - memory.summary_at_s >= min(self._settings.poll_s, self._settings.status_s)
        ended = memory.summary is not None and memory.summary["state"] in status_values.OVER
        if memory.api_problem or not due or ended or self.view.invalid:
            return
        try:
            memory.summary = await self._api.fetch(self.view.uid, "summary")
            memory.summary_at_s = now_s
            total = sum(memory.summary["recovery"]["counts"].values())
            mark = 2 * total - len(memory.summary["recovery"]["active"])
            if mark != memory.recoveries_told:
                recoveries = await self._api.fetch(self.view.uid, "recoveries")
                await self._tell_recoveries(recoveries)
                await self._warden.judge(self.view, recoveries, now_s)
                memory.recoveries_told = mark
        except ApiError as error:
            memory.api_problem = str(error)

    async def _tell_recoveries(self, recoveries: list[dict[str, Any]]) -> None:
        since_s = self._started_s - EVENTS_OLD_S
        notes = narrator.of_recoveries(recoveries, since_s)
        notes = [n for n in notes if (n.reason, n.key) not in self._memory.told]
        self._memory.told |= {(n.reason, n.key) for n in notes}
        await self._hands.tell(self.view, notes)

    def _seen(self) -> JobSeen:
        memory, view = self._memory, self.view
        pods, wishes = self.pods.list(), memory.wishes
        summary = status_values.read_summary(memory.summary) if memory.summary is not None else None
        wanted = wishes.num_pods if wishes is not None else (view.job.num_pods if view.job else 0)
        spares = view.job.spec.spares.replicas if view.job else 0
        return JobSeen(
            initialized=memory.wishes is not None,
            invalid=view.invalid or (memory.refused if memory.wishes is None else ""),
            refused=memory.refused,
            api_problem=memory.api_problem,
            summary=summary,
            pods=count_pods(pods, wishes, wanted, spares),
            suspend=view.suspend,
            suspended=wishes is not None and wishes.suspended,
            problems=find_problems(pods, memory.repair, memory.make_problem),
            deadline=memory.deadline,
            before=status_values.read_state(memory.status),
        )
