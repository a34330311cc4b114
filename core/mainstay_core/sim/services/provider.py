"""The maker of pods: it brings up others for those that end, as many as the api wants.

It stands for a kubelet with the operator, or for the pool of local mode. What to make, end and
tell is decided by :mod:`mainstay_core.pool.repair`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mainstay_core.base.ids import PodUid
from mainstay_core.coordinator.scaling import PodPlan, plan_pods
from mainstay_core.coordinator.state import CoordinatorState, uid_of
from mainstay_core.job.phase import JobPhase
from mainstay_core.pool.losses import PodDemand
from mainstay_core.pool.memory import PoolMemory
from mainstay_core.pool.observed import ObservedPod, PodPhase
from mainstay_core.pool.repair import Repair, RepairPolicy, plan_repair
from mainstay_core.sim.engine import Process, Steps, Violation
from mainstay_core.sim.network import Unreachable
from mainstay_core.sim.services.api import Request
from mainstay_core.sim.services.supervisor import Supervisor
from mainstay_core.sim.surroundings import Surroundings
from mainstay_core.sim.trainers.launcher import Launcher
from mainstay_core.supervisor.events import LeaveRequested
from mainstay_core.wire.facts import Fact

PROVIDER = "provider"
MAX_PODS = 80
TELL_AGAIN_S = 0.5
LOOK_S = 0.5
"""How often the api's wishes are looked at."""
NOTICE_S = 4.0
"""How long it may take until somebody hears of a node that vanished."""
NOT_WANTED = "it is not wanted any more"
POLICY = RepairPolicy(max_repairs=MAX_PODS)
KILL_AFTER_S = 15.0
"""A pod that was told to end, and has had its time for handing over, is killed then."""


@dataclass(slots=True)
class Pod:
    """A pod's two process groups."""

    uid: PodUid
    supervisor: Supervisor
    launcher: Launcher
    lives: int = 1
    told: bool = False
    """Whether it was told to end."""
    ends_by_s: float = 0.0
    """When it is killed then."""

    def kill(self, *, silent: bool = False) -> None:
        """Kill everything on it."""
        self.supervisor.kill(silent=silent)
        self.launcher.kill(silent=silent)

    @property
    def runs(self) -> bool:
        """Whether any process of it is left."""
        children = self.launcher.children.values()
        return self.supervisor.alive or self.launcher.alive or any(c.alive for c in children)


class Provider(Process):
    """Makes pods, and others for those that end.

    Args:
        world: everything around it.
        follows: whether it asks the api how many are wanted; else their number stays.
        max_pods: more than so many in a run are a storm.
    """

    def __init__(self, world: Surroundings, *, follows: bool, max_pods: int = MAX_PODS) -> None:
        super().__init__(world.engine, PROVIDER, PROVIDER)
        self.world, self._max_pods = world, max_pods
        self.follows = follows
        self.pods: dict[str, Pod] = {}
        self._num_made = self._num_coming = self._num_kept = 0
        self._making: set[PodUid] = set()
        """Pods that are on their way, by names that they have until then."""
        self._telling: set[PodUid] = set()

    def begin(self, num_pods: int) -> None:
        """Make the first pods, and keep them from then on."""
        self._num_kept = num_pods
        for _ in range(num_pods):
            self._make_pod()
        if self.follows:
            self.spawn(self._keep())

    def ask(self, route: str, body: object) -> Steps[int]:
        """Ask the api something, once; returns the status of its answer, 0 without one."""
        try:
            reply = yield from self.world.network.request(
                self, self.world.pick_api(), Request(route, body), 5.0
            )
        except Unreachable:
            return 0
        status: int = reply.status
        return status

    def ask_once(self, route: str, body: object) -> Steps[None]:
        """Ask the api something, as a user does who does not look at the answer."""
        yield from self.ask(route, body)

    # What is wanted ---------------------------------------------------------

    def _keep(self) -> Steps[None]:
        while not self.world.store.last.terminal:
            yield LOOK_S
            state = self.world.store.state
            if state is not None:
                self._repair(state, plan_pods(state))
            elif not any(self._knows(pod) for pod in self.pods.values()):
                # Whoever made the job makes it again, from its definition.
                yield from self.ask("restore", None)

    @staticmethod
    def _knows(pod: Pod) -> bool:
        supervisor = pod.supervisor
        return supervisor.alive and supervisor.state.registered and not supervisor.state.ending

    def _repair(self, state: CoordinatorState, wanted: PodPlan) -> None:
        demand = PodDemand(
            suspended=state.phase is JobPhase.SUSPENDED,
            num_pods=wanted.num_pods,
            leaving=frozenset(wanted.leaving),
            ending=wanted.ending,
            living={uid_of(p): uid_of(p) for p in state.pods if not p.gone},
        )
        repair = self._plan(demand)
        for fact in repair.tell:
            if fact.pod not in self._telling:
                self.spawn(self._tell(fact))
        for end in repair.end:
            if end.uid in self.pods:
                self._end(self.pods[end.uid])
            self._making.discard(end.uid)
        for _ in repair.make:
            self.spawn(self._arrive(self._announce()))

    def _plan(self, demand: PodDemand, *lost: ObservedPod) -> Repair:
        return plan_repair(
            memory=PoolMemory(),
            pods=(*self._observe(), *lost),
            nodes=None,
            demand=demand,
            policy=POLICY,
            now_s=self.world.clock(PROVIDER),
        )

    def _observe(self) -> tuple[ObservedPod, ...]:
        """Return the pods that there are, and those that are on their way."""
        seen = [
            _observed(pod.uid, number, pod.told, pod.ends_by_s)
            for number, pod in enumerate(self.pods.values())
        ]
        coming = enumerate(sorted(self._making), len(seen))
        return (*seen, *(ObservedPod(uid=uid, name=uid, index=i) for i, uid in coming))

    def _end(self, pod: Pod) -> None:
        """SIGTERM; SIGKILL when it does not end."""
        late_s = self.world.config.handover_s + KILL_AFTER_S
        pod.told, pod.ends_by_s = True, self.world.clock(PROVIDER) + late_s
        supervisor = pod.supervisor
        supervisor.after(0.0, supervisor.feed, LeaveRequested(NOT_WANTED))
        if not supervisor.alive:
            pod.kill()
        self.after(late_s, pod.kill)

    # Pods -------------------------------------------------------------------

    def _announce(self) -> PodUid:
        self._num_coming += 1
        uid = PodUid(f"coming{self._num_coming}")
        self._making.add(uid)
        return uid

    def _arrive(self, uid: PodUid) -> Steps[None]:
        yield self.world.pace.startup_s()
        if uid in self._making and not self.world.store.last.terminal:
            self._making.remove(uid)
            self._make_pod()

    def _make_pod(self) -> None:
        self._num_made += 1
        if self._num_made > self._max_pods:
            raise Violation(f"I5: {self._max_pods} pods were used up")
        uid = PodUid(f"pod{self._num_made}")
        pod = Pod(uid, Supervisor(self.world, uid, 1), Launcher(self.world, uid, 1))
        self.pods[uid] = pod
        self._watch(pod)

    def _watch(self, pod: Pod) -> None:
        ended: list[bool] = []

        def end(silent: bool) -> None:
            if not ended:
                ended.append(silent)
                delay_s = self.engine.rng.random() * (NOTICE_S if silent else 0.05)
                self.after(delay_s, self._spawn_replace, pod)

        pod.supervisor.at_end.append(end)
        pod.launcher.at_end.append(end)

    def _spawn_replace(self, pod: Pod) -> None:
        self.spawn(self._replace(pod))

    def _replace(self, pod: Pod) -> Steps[None]:
        """A pod's half has ended: bring up another, in place or as a new pod."""
        if self.world.store.last.terminal:
            return
        vanished = pod.supervisor.vanished or pod.launcher.vanished
        over = pod.told or vanished or pod.supervisor.left is not None
        # A pod that was told to end and dies before it has left gets no other container.
        over = over or (not pod.supervisor.alive and pod.supervisor.state.leaving is not None)
        if self.world.scenario.restarts_in_place and not over:
            yield self.world.pace.startup_s()
            self._restart(pod)
            return
        pod.kill()
        del self.pods[pod.uid]
        repair = self._repair_loss(pod.uid)
        coming = [self._announce() for _ in repair.make]
        for fact in repair.tell:
            yield from self._tell(fact)
        for uid in coming:
            yield from self._arrive(uid)

    def _repair_loss(self, uid: PodUid) -> Repair:
        """Return what follows from a loss; if nobody is asked, as many pods stay as there were."""
        lost = ObservedPod(
            uid=uid,
            name=uid,
            index=len(self.pods),
            phase=PodPhase.FAILED,
            evidence="a process of it ended",
        )
        demand = PodDemand(
            num_pods=0 if self.follows else self._num_kept,
            leaving=frozenset(pod.uid for pod in self.pods.values() if pod.told),
            living={PodUid(known): known for known in (uid, *self.pods, *self._making)},
        )
        return self._plan(demand, lost)

    def _restart(self, pod: Pod) -> None:
        pod.lives += 1
        if not pod.supervisor.alive:
            pod.launcher.kill()
            pod.supervisor = Supervisor(self.world, pod.uid, pod.lives)
        pod.launcher = Launcher(self.world, pod.uid, pod.supervisor.number)
        self._watch(pod)

    def _tell(self, fact: Fact) -> Steps[None]:
        self._telling.add(fact.pod)
        while (yield from self.ask("facts", (fact,))) in (0, 503):
            yield TELL_AGAIN_S
        self._telling.discard(fact.pod)


@lru_cache(maxsize=256)
def _observed(uid: PodUid, number: int, is_told: bool, ends_by_s: float) -> ObservedPod:
    return ObservedPod(
        uid=uid,
        name=uid,
        index=number,
        phase=PodPhase.RUNNING,
        terminating=is_told,
        ends_by_s=ends_by_s,
        ended_for=NOT_WANTED if is_told else "",
    )
