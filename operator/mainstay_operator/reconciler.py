"""Reconciles one job: makes its pods and objects what they should be, again and again.

Level-triggered: every pass starts from the whole of what is known, so an event
that was lost, or an operator that was away, costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mainstay_core.base.backoff import doubled_s
from mainstay_core.base.logs import about
from mainstay_core.base.words import count
from mainstay_core.job.phase import TERMINAL
from mainstay_core.job.spec import LABEL_UID
from mainstay_core.pool.conditions import ObservedJob
from mainstay_core.pool.counts import count_pods, find_problems
from mainstay_core.pool.losses import Loss, PodDemand, demand_of
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import ObservedNode, PodPhase
from mainstay_core.pool.repair import Repair, plan_repair
from mainstay_core.wire.api import ApiError, Failure
from mainstay_operator import expiry, narrator, quarantine, submission
from mainstay_operator import status as status_values
from mainstay_operator.actuator import Actuator, NameTakenError
from mainstay_operator.api_client import ApiClient
from mainstay_operator.decisions import about_job, log_decision
from mainstay_operator.events import Note
from mainstay_operator.kube import KubeError
from mainstay_operator.liveness import RunningPass
from mainstay_operator.metrics import POD_STATES, Metrics
from mainstay_operator.observed import job_of, observe_pod
from mainstay_operator.pod_cache import PodCache
from mainstay_operator.quarantine import NodeQuarantine
from mainstay_operator.resources import FINALIZER, JobView, ObjectNames
from mainstay_operator.settings import Settings
from mainstay_operator.state import ReconcilerState
from mainstay_operator.status import PodRecord

logger = logging.getLogger(__name__)

COALESCE_S = 0.05
"""Events that come so close together are one pass."""
OBJECTS_EVERY = 10
"""Resyncs between two applies of objects that nobody is known to have changed."""
TAKEN_AGAIN_S = 10.0
"""While somebody else has a name that the job needs, it is looked again so often."""
MAX_BACKOFF_S = 30.0
EVENTS_OLD_S = 900.0
"""What happened so long before the operator came is not told again."""


class Reconciler:
    """Reconciles one job until it is no more.

    Args:
        view: the job.
        pods: what is known of its pods.
        nodes: returns the nodes by name, None if they are not watched.
        actuator: acts in the cluster.
        api: client of the api.
        settings: of the operator.
        metrics: counts what is done.
    """

    def __init__(
        self,
        view: JobView,
        *,
        pods: PodCache,
        nodes: Callable[[], Mapping[str, ObservedNode] | None],
        actuator: Actuator,
        api: ApiClient,
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self.view = view
        self.pods = pods
        self._nodes = nodes
        self._actuator = actuator
        self._api = api
        self._settings = settings
        self._metrics = metrics
        self._wake = asyncio.Event()
        record = PodRecord.of_status(view.status)
        self._state = ReconcilerState(
            record=record,
            status=view.status,
            memory=PoolMemory(counted=tuple(record.counted_times())),
        )
        self._quarantine = NodeQuarantine(view.status, pods, actuator)
        self._started_s = time.time()
        self._began_s: float | None = None
        self.passed_at_s = time.monotonic()
        """Monotonic clock of the last finished pass, or of the start."""

    def update(self, view: JobView) -> None:
        """Take the job's object as it is now."""
        # Its status is ours: what comes back by the watch may be older than what was written.
        self.view = view.after(self.view)
        self.wake()

    def wake(self) -> None:
        """Have the next pass begin soon."""
        self._wake.set()

    def running_pass(self) -> RunningPass | None:
        """Return the pass that has not ended yet, if there is one."""
        if self._began_s is None:
            return None
        demand = self._state.demand
        return RunningPass(
            job=f"{self.view.namespace}/{self.view.name}",
            since_s=self._began_s,
            num_pods=demand.num_pods if demand is not None else 0,
        )

    async def run(self) -> None:
        """Reconcile the job until it is no more."""
        failures = 0
        while True:
            self._wake.clear()
            self._began_s, result = time.monotonic(), "crashed"
            try:
                done = await self.reconcile()
                failures, result = 0, "done"
            except KubeError as error:
                failures += 1
                done, result = False, "refused"
                logger.warning("%s", error, extra=about(**about_job(self.view)))
            except asyncio.CancelledError:
                result = "stopped"
                raise
            finally:
                self._metrics.note_pass(result, self._began_s)
                self._began_s, self.passed_at_s = None, time.monotonic()
            if done:
                return
            pause_s = self._pause_s() if not failures else doubled_s(0.5, failures, MAX_BACKOFF_S)
            try:
                await asyncio.wait_for(self._wake.wait(), pause_s)
                await asyncio.sleep(COALESCE_S)
            except TimeoutError:
                pass

    def _pause_s(self) -> float:
        demand = self._state.demand
        if demand is not None and (demand.over or demand.suspended):
            return min(self._settings.resync_s, 10 * self._settings.poll_s)
        return self._settings.poll_s

    async def reconcile(self) -> bool:
        """Make what is agree with what is wanted, once; return whether the job is no more."""
        view, state = self.view, self._state
        if FINALIZER in view.finalizers:
            await self._actuator.remove_finalizer(view)
        if view.deleted_at_s is not None:
            return True
        if not view.ours:
            return False
        await self._actuator.tell_again(view)
        if view.invalid and not self._has_begun:
            await self._write_status()
            return False
        now_s = time.time()
        names = await self._keep_objects(now_s)
        await self._resync(now_s)
        await self._report_losses()
        if await submission.try_template(view, state, self._actuator, names, self.pods.list()):
            await self._tell_sizes()
            await self._ask_api()
        # A change that cannot be used changes nothing. An operator that has not seen the job before
        # that change makes no pods, as it does not know what they were.
        if view.job is not None and state.demand is not None and not state.api_problem:
            await self._repair(state.demand, names, now_s)
        await self._keep_budget(names)
        await self._quarantine.review(view, now_s)
        await self._write_status()
        await self._quarantine.taint()
        return await expiry.expire(view, state.status, self._actuator)

    @property
    def _has_begun(self) -> bool:
        """Whether the api has ever taken the job, as this operator or one before it has seen."""
        return self._state.demand is not None or self._state.record.made > 0

    async def _keep_objects(self, now_s: float) -> ObjectNames:
        """Keep the objects beside the pods, now and then; return their names."""
        state, view = self._state, self.view
        if state.names is None:
            state.names = await self._actuator.find_names(view)
        is_taken = bool(state.taken_names or state.taken_budget)
        every_s = TAKEN_AGAIN_S if is_taken else OBJECTS_EVERY * self._settings.resync_s
        if now_s - state.objects_at_s > every_s or state.objects_for != view.generation:
            taken = await self._actuator.keep_objects(view, state.names)
            notes = narrator.of_taken_names(taken, state.taken_names)
            state.taken_names = taken
            state.objects_at_s, state.objects_for = now_s, view.generation
            state.min_available = -1
            await self._actuator.tell(view, notes)
        return state.names

    async def _tell_sizes(self) -> None:
        """Say what ranks take before a job begins, and what its replicas have no memory for."""
        view, state = self.view, self._state
        if view.job is None or state.sized == view.generation:
            return
        state.sized = view.generation
        notes, ranks = narrator.of_sizes(view.job, has_begun=self._has_begun)
        for rank in ranks:
            log_decision(view, "RankSizes", rank)
        await self._tell_once(notes)

    # --- what is seen -----------------------------------------------------------------------------

    async def _resync(self, now_s: float) -> None:
        """Compare with a list what the watch has shown."""
        if now_s - self._state.resync_at_s < self._settings.resync_s:
            return
        known = {p.uid for p in self.pods.list()}
        listed = await self._actuator.kube.list(
            "pods", self.view.namespace, f"{LABEL_UID}={self.view.uid}"
        )
        ours = [observe_pod(body) for body in listed if job_of(body) == self.view.uid]
        if self.pods.apply_list(ours, known):
            logger.warning("the watch has missed pods", extra=about(**about_job(self.view)))
            self._metrics.note_missed("pods")
        self._state.resync_at_s = now_s

    async def _report_losses(self) -> None:
        """Tell of pods that are gone at once, by what the api was last heard to want."""
        state = self._state
        state.memory = state.memory.with_last_words(self.pods.last_words)
        self.pods.last_words.clear()
        if state.demand is None:
            return
        losses = state.memory.find_untold(
            self.pods.list(), self._nodes(), state.demand, time.time()
        )
        facts = [loss.fact() for loss in losses if loss.uid in state.demand.living]
        if not facts:
            return
        try:
            await self._api.post_facts(self.view.uid, facts)
        except ApiError as error:
            logger.warning("%s", error, extra=about(**about_job(self.view)))
            return
        # Heard: the next demand will not take them for living.
        state.demand_at_s = 0.0

    # --- the api ----------------------------------------------------------------------------------

    async def _ask_api(self) -> None:
        """Submit the job if it is due, pass on what was asked for, learn what is wanted."""
        state, view = self._state, self.view
        if time.time() < state.ask_at_s:
            return
        try:
            await submission.submit(view, state, self._api)
            await submission.report_topology(
                view,
                state,
                self._api,
                pods=self.pods.list(),
                nodes=self._nodes(),
                again_s=self._settings.resync_s,
            )
            state.deadline = state.deadline or expiry.find_deadline(view, state.status, time.time())
            if state.deadline and not (state.demand is not None and state.demand.over):
                await self._api.stop_job(view.uid)
            if time.time() - state.demand_at_s >= self._settings.poll_s:
                await self._fetch_demand()
            state.api_problem = ""
            state.unknown_since_s = 0.0
        except ApiError as error:
            state.note_api_error(error, time.time())
            if error.failure is Failure.UNKNOWN:
                submission.note_unknown(state, self.pods.list())

    async def _fetch_demand(self) -> None:
        state = self._state
        demand, pods = demand_of(await self._api.fetch_pods(self.view.uid)), self.pods.list()
        if state.demand is None:
            # Whom the api gave up before this operator came, it has taken for living before.
            state.known |= {p.uid for p in pods if p.phase is PodPhase.RUNNING}
        state.known = (state.known & {p.uid for p in pods}) | {*demand.living}
        state.demand = replace(demand, known=frozenset(state.known))
        state.memory = state.memory.after_hearing(demand)
        state.demand_at_s = time.time()

    # --- pods -------------------------------------------------------------------------------------

    async def _repair(self, demand: PodDemand, names: ObjectNames, asked_since_s: float) -> None:
        """Make and end pods.

        Args:
            demand: what the api said last.
            names: of what new pods refer to.
            asked_since_s: when this pass began: nothing is ended for an answer before that.
        """
        state, view, now_s = self._state, self.view, time.time()
        pods = self.pods.list()
        settings = self._settings
        policy = view.repair_policy(
            force_delete_s=settings.force_delete_s,
            image_pull_s=settings.image_pull_s,
            stranded_s=settings.stranded_s,
            ignore_cordon=settings.ignore_cordon,
        )
        nodes = quarantine.without(self._nodes(), self._quarantine.state)
        plan = partial(
            plan_repair, pods=pods, nodes=nodes, taken=state.taken, policy=policy, now_s=now_s
        )
        repair = plan(memory=state.memory, demand=demand)
        if repair.end and state.demand_at_s < asked_since_s:
            # A pod that was unknown to the api, or needless, may have a rank by now.
            try:
                await self._fetch_demand()
            except ApiError as error:
                state.note_api_error(error, time.time())
                return
            assert state.demand is not None
            repair = plan(memory=state.memory, demand=state.demand)
        before, state.repair = state.repair, repair
        if before is None or repair.counts != before.counts:
            log_decision(view, "Repair", repair.reason)
        notes = self._account(repair.losses)
        told = await self._report_facts(repair)
        # Without what they need beside them, pods would get what is somebody else's.
        due = now_s >= state.make_at_s and not state.taken_names
        make = repair.make if due else ()
        shunned = state.record.nodes_without_image(pods, now_s - policy.window_s)
        options = self._actuator.pod_options(names, pods, self._quarantine.state.avoided, shunned)
        made, errors = await self._actuator.make_pods(view, make, options)
        self.pods.note_made(made)
        if due and repair.make:
            self._note_refusal(errors, now_s)
        state.record = replace(state.record, made=state.record.made + len(made))
        errors += await self._actuator.end_pods(view, repair.end)
        state.taken |= {e.index for e in errors if isinstance(e, NameTakenError)}
        told_of = state.action_problems
        notes += narrator.of_repair(repair, made, errors, before=before, told=told_of)
        if errors:
            state.action_problems |= narrator.group_refusals(errors).keys()
        elif make or not repair.make:
            state.action_problems = frozenset()
        notes += narrator.of_container_ends(pods, state.reported_ends)
        state.memory = state.memory.after_look([*pods, *made], nodes, repair.losses, told=told)
        await self._actuator.tell(view, notes)

    def _note_refusal(self, errors: Sequence[Exception], now_s: float) -> None:
        """Pods that are refused (quota, admission) are tried again ever later, and it is shown."""
        state = self._state
        refusals = [e for e in errors if not isinstance(e, NameTakenError)]
        state.make_problem = narrator.explain_refusal(refusals[0]) if refusals else None
        state.make_failures = state.make_failures + 1 if refusals else 0
        pause_s = doubled_s(1.0, state.make_failures, MAX_BACKOFF_S) if refusals else 0.0
        state.make_at_s = now_s + pause_s

    def _account(self, losses: tuple[Loss, ...]) -> list[Note]:
        """Count losses once, however often they are seen; return what to tell of them."""
        state = self._state
        if state.demand is not None and state.demand.over:
            return []  # they have done their work
        state.memory, new = state.memory.account(losses)
        state.record = state.record.with_losses(new)
        self._metrics.note_losses(new)
        return narrator.of_losses(new)

    async def _report_facts(self, repair: Repair) -> bool:
        if not repair.tell:
            return True
        try:
            await self._api.post_facts(self.view.uid, repair.tell)
        except ApiError as error:
            self._state.note_api_error(error, time.time())
            return False
        self._state.demand_at_s = 0.0
        return True

    async def _keep_budget(self, names: ObjectNames) -> None:
        """Have the PodDisruptionBudget follow the quorum."""
        state = self._state
        demand = state.demand
        if demand is None:
            return
        wanted = 0 if demand.over or demand.suspended else demand.serving
        if wanted != state.min_available:
            found = await self._actuator.keep_disruption_budget(self.view, names, wanted)
            taken = () if found is None else (found,)
            notes = narrator.of_taken_names(taken, state.taken_budget)
            state.taken_budget, state.min_available = taken, wanted
            if wanted != state.reported_budget:
                left = count(wanted, "pod")
                log_decision(self.view, "KeepBudget", f"evictions must leave {left}")
                state.reported_budget = wanted
            await self._actuator.tell(self.view, notes)

    # --- status -----------------------------------------------------------------------------------

    async def _write_status(self) -> None:
        state, now_s = self._state, time.time()
        await self._fetch_page(now_s)
        seen = self._seen()
        await self._tell_once(narrator.of_refusal(seen.refused, self.view.generation))
        counts = {state: getattr(seen.pods, state) for state in POD_STATES}
        self._metrics.show_pods(self.view.uid, self.view.namespace, self.view.name, counts)
        status = status_values.build_status(
            replace(self.view, status=dict(state.status)),
            seen,
            state.page,
            state.record,
            now_s,
        ) | quarantine.show(self._quarantine.state)
        if status == state.status:
            return
        due = now_s - state.status_at_s >= self._settings.status_s
        if not due and not status_values.is_urgent(state.status, status):
            return
        # Told before it is written: an operator that ends in between leaves it to the next one.
        await self._tell_once(narrator.of_progress(state.status, status))
        if await self._actuator.write_status(self.view, status):
            was, now = state.status.get("state") or "none", status["state"]
            if was != now:
                log_decision(self.view, "State", f"from {was} to {now}: {status['reason']}")
            state.status, state.status_at_s = status, now_s

    async def _fetch_page(self, now_s: float) -> None:
        state = self._state
        due = now_s - state.page_at_s >= min(self._settings.poll_s, self._settings.status_s)
        ended = state.page is not None and state.page.state in TERMINAL
        busy = now_s < state.ask_at_s
        unasked = self.view.invalid and not self._has_begun
        if state.api_problem or busy or not due or ended or unasked:
            return
        try:
            state.page = await self._api.fetch_page(self.view.uid)
            state.page_at_s = now_s
            await self._tell_once(narrator.of_page(state.page, self._told_since_s))
            self._quarantine.learn(state.page.findings)
            recovery = state.page.recovery
            mark = 2 * sum(recovery.counts.values()) - len(recovery.active)
            if mark != state.recoveries_reported:
                recoveries = await self._api.fetch_recoveries(self.view.uid)
                self._report_unread(recoveries.unread)
                notes = narrator.of_recoveries(recoveries.read, self._told_since_s)
                await self._tell_once(notes)
                await self._quarantine.judge(self.view, recoveries.read, now_s)
                state.recoveries_reported = mark
        except ApiError as error:
            state.note_api_error(error, time.time())

    def _report_unread(self, unread: Sequence[str]) -> None:
        """Say once of each recovery that it cannot be read: nothing else may depend on it."""
        new = unread[self._state.num_unread :]
        for why in new:
            logger.error("%s; it is left out", why, extra=about(**about_job(self.view)))
        self._metrics.recoveries_unread.inc(len(new))
        self._state.num_unread = len(unread)

    @property
    def _told_since_s(self) -> float:
        """The time from which on what happened is told of."""
        return self._started_s - EVENTS_OLD_S

    async def _tell_once(self, notes: Sequence[Note]) -> None:
        """Make Events of what was not told yet."""
        new = [n for n in notes if (n.reason, n.key) not in self._state.told]
        await self._actuator.tell(self.view, new)
        self._state.told |= {(n.reason, n.key) for n in new}

    def _seen(self) -> ObservedJob:
        state, view = self._state, self.view
        pods, demand = self.pods.list(), state.demand
        summary = status_values.summary_of(state.page) if state.page is not None else None
        wanted = demand.num_pods if demand is not None else (view.job.num_pods if view.job else 0)
        spares = view.job.spec.spares.replicas if view.job else 0
        taken = [name.describe() for name in (*state.taken_names, *state.taken_budget)]
        refused = view.invalid or state.refused
        return ObservedJob(
            initialized=state.demand is not None,
            invalid="" if self._has_begun else refused,
            refused=refused if self._has_begun else "",
            api_problem=state.api_problem,
            is_api_understood=state.api_failure is not Failure.NOT_UNDERSTOOD,
            summary=summary,
            pods=count_pods(pods, demand, wanted, spares),
            suspend=view.suspend,
            suspended=demand is not None and demand.suspended,
            problems=find_problems(pods, state.repair, state.make_problem, "; ".join(taken)),
            deadline=state.deadline,
            before=status_values.read_state(state.status),
        )
