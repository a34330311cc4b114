"""One run: the job, its pods, its api, and somebody who replaces what is lost."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass, replace

from mainstay_core import coordinator
from mainstay_core.errors import MainstayError
from mainstay_core.facts import Fact, FactKind
from mainstay_core.ids import Incarnation, PodUid
from mainstay_core.jobstate import JobPhase
from mainstay_core.messages import Plan
from mainstay_core.scaling import plan_pods
from mainstay_core.sim.api import Api
from mainstay_core.sim.checks import Checks
from mainstay_core.sim.deciding import Request
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.engine import Engine, Process, Steps, Violation
from mainstay_core.sim.faults import Faults
from mainstay_core.sim.launcher import Launcher
from mainstay_core.sim.network import Network, Unreachable
from mainstay_core.sim.scenario import Pace, Scenario
from mainstay_core.sim.store import Store
from mainstay_core.sim.supervisor import Supervisor
from mainstay_core.sim.trainer import Trainer
from mainstay_core.supervision_events import LeaveAsked

CALM_S = 240.0
"""Once faults are over and everything can be replaced, a job must finish within so long."""
PLANS, PLANS_PER_FAULT = 12, 24
MAX_PODS = 80
TELL_AGAIN_S = 0.5
NOTICE_S = 4.0
"""How long it may take until somebody hears of a node that vanished."""
PROVIDER = "provider"


@dataclass(slots=True)
class Pod:
    """A pod's two process groups."""

    uid: PodUid
    supervisor: Supervisor
    launcher: Launcher
    lives: int = 1

    def kill(self, *, silent: bool = False) -> None:
        """Kill everything on it."""
        self.supervisor.kill(silent=silent)
        self.launcher.kill(silent=silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a run."""

    seed: int
    violation: str = ""
    """Empty if everything held."""
    where: str = ""
    """Who waited for whom, or the traceback."""
    finished_s: float = 0.0
    num_events: int = 0
    num_checks: int = 0
    num_plans: int = 0
    faults: tuple[str, ...] = ()
    seen: dict[str, int]
    trace: tuple[str, ...] = ()


class World:
    """Everything that happens in one run.

    Args:
        scenario: what is drawn of the seed.
        tracing: whether a trace is kept.
    """

    def __init__(self, scenario: Scenario, *, tracing: bool = False) -> None:
        self.scenario, self.config = scenario, scenario.config
        self.slots_per_pod = scenario.slots_per_pod
        self.engine = Engine(scenario.seed, tracing=tracing)
        self.pace = Pace(rng=self.engine.rng, block=scenario.block_s)
        self.network = Network(self.engine, scenario.latency)
        shape = self.config.shape
        self.checks = Checks(shape, PLANS + PLANS_PER_FAULT * len(scenario.faults))
        self.disk = Disk(len(shape.positions))
        self._skew_s: dict[str, float] = {}
        self._num_names = 0
        state = coordinator.initial(self.config, self.clock("api0"))
        self.store = Store(self.engine, self.network, state, self.checks)
        self.trainers: dict[str, Trainer] = {}
        self.pods: dict[str, Pod] = {}
        self._num_pods = 0
        self._provider = Process(self.engine, PROVIDER, PROVIDER)
        self.api_nodes = [f"api{i}" for i in range(scenario.apis)]
        self.apis: dict[str, Api] = {}
        self._api_lives = 0
        for node in self.api_nodes:
            self.start_api(node)
        num_pods = -(-shape.num_ranks // self.slots_per_pod) + scenario.spares
        for _ in range(num_pods):
            self._make_pod()
        self.store.remembers = any(f.kind == "store-fallback" for f in scenario.faults)
        if any(f.kind == "drain" for f in scenario.faults):
            self._provider.spawn(self._end_drained())
        self.faults = Faults(self, scenario.faults)

    # What the others ask ----------------------------------------------------

    def clock(self, node: str) -> float:
        """Wall clock of a node."""
        skew_s = self._skew_s.get(node)
        if skew_s is None:
            bound_s = self.scenario.skew_s * (0.01 if node.startswith("api") else 1.0)
            skew_s = self._skew_s[node] = self.engine.rng.uniform(-bound_s, bound_s)
        return 1000.0 + self.engine.now_s + skew_s

    def draw_name(self) -> str:
        """Return a name that nobody else has."""
        self._num_names += 1
        return f"{self._num_names:x}"

    def pick_api(self) -> str:
        """Return the replica that a request goes to."""
        return self.engine.rng.choice(self.api_nodes)

    def start_api(self, node: str) -> None:
        """Start a replica, or another life of it."""
        self._api_lives += 1
        self.apis[node] = Api(self, node, self._api_lives)

    def new_trainer(self, pod: PodUid, slot: int, incarnation: Incarnation) -> Trainer:
        """Return the process that a launcher has just forked."""
        trainer = self.trainers[incarnation] = Trainer(self, pod, slot, incarnation)
        return trainer

    def left(self, supervisor: Supervisor) -> None:
        """A supervisor has left because the job is over."""
        supervisor.kill()

    @property
    def newest_plan(self) -> Plan | None:
        """The plan that became durable last."""
        return self.checks.plans[-1] if self.checks.plans else None

    def ask(self, route: str, body: object) -> None:
        """Ask the api something, as a user does: once."""
        self._provider.spawn(self._ask(route, body))

    def _end_drained(self) -> Steps[None]:
        """End the pods that were drained and serve no more; make others for them."""
        while not self.store.last.terminal:
            yield TELL_AGAIN_S
            state = self.store.last
            drained = {p.registration.pod for p in state.pods if p.leaving and not p.gone}
            wanted = plan_pods(state)
            if len(set(self.pods) - drained) < wanted.num_pods:
                self._make_pod()
            for uid in wanted.ending:
                if uid in drained and uid in self.pods:
                    self.pods[uid].supervisor.feed(LeaveAsked("its work is handed over"))

    def _ask(self, route: str, body: object) -> Steps[None]:
        with suppress(Unreachable):
            yield from self.network.request(
                self._provider, self.pick_api(), Request(route, body), 5.0
            )

    # Pods -------------------------------------------------------------------

    def _make_pod(self) -> None:
        self._num_pods += 1
        if self._num_pods > MAX_PODS:
            raise Violation(f"I5: {MAX_PODS} pods were used up")
        uid = PodUid(f"pod{self._num_pods}")
        pod = Pod(uid, Supervisor(self, uid, 1), Launcher(self, uid, 1))
        pod.supervisor.launcher = pod.launcher
        self.pods[uid] = pod
        self._watch(pod)

    def _watch(self, pod: Pod) -> None:
        ended: list[bool] = []

        def end(silent: bool) -> None:
            if not ended:
                ended.append(silent)
                delay_s = self.engine.rng.random() * (NOTICE_S if silent else 0.05)
                self._provider.after(delay_s, self._spawn_replace, pod)

        pod.supervisor.at_end.append(end)
        pod.launcher.at_end.append(end)

    def _spawn_replace(self, pod: Pod) -> None:
        self._provider.spawn(self._replace(pod))

    def _replace(self, pod: Pod) -> Steps[None]:
        """A pod's half has ended: bring up another, in place or as a new pod."""
        if self.store.last.terminal:
            return
        vanished = pod.supervisor.vanished or pod.launcher.vanished
        if self.scenario.restarts_in_place and not vanished and pod.supervisor.left is None:
            yield self.pace.startup_s()
            self._restart(pod)
            return
        pod.kill()
        del self.pods[pod.uid]
        yield from self._tell_gone(pod)
        yield self.pace.startup_s()
        self._make_pod()

    def _restart(self, pod: Pod) -> None:
        pod.lives += 1
        if not pod.supervisor.alive:
            pod.launcher.kill()
            pod.supervisor = Supervisor(self, pod.uid, pod.lives)
        pod.launcher = Launcher(self, pod.uid, pod.supervisor.number)
        pod.supervisor.launcher = pod.launcher
        self._watch(pod)

    def _tell_gone(self, pod: Pod) -> Steps[None]:
        fact = Fact(
            kind=FactKind.POD_GONE,
            pod=pod.uid,
            evidence="a process of it ended",
            observed_at_s=self.clock(PROVIDER),
        )
        while True:
            try:
                reply = yield from self.network.request(
                    self._provider, self.pick_api(), Request("facts", (fact,)), 5.0
                )
                if reply.status != 503:
                    return
            except Unreachable:
                pass
            yield TELL_AGAIN_S

    # The run ----------------------------------------------------------------

    def run(self) -> Outcome:
        """Run until the job has ended, or something is wrong."""
        violation = where = ""
        try:
            self._run()
        except Violation as found:
            violation, where = str(found), self.describe()
        except (AssertionError, LookupError, TypeError, ValueError, MainstayError) as error:
            violation = f"{type(error).__name__}: {error}"
            where = traceback.format_exc(limit=-6)
        engine = self.engine
        return Outcome(
            seed=self.scenario.seed,
            violation=violation,
            where=where,
            finished_s=engine.now_s,
            num_events=engine.num_events,
            num_checks=self.checks.num_checks,
            num_plans=len(self.checks.plans),
            faults=tuple(self.faults.struck),
            seen=dict(self.checks.seen),
            trace=tuple(engine.trace),
        )

    def _run(self) -> None:
        engine = self.engine
        while not self.store.last.terminal:
            if not engine.step():
                raise Violation("I5: nothing can happen any more")
            if self.store.data.state is None and not self._is_known():
                self.checks.seen["abandoned"] += 1
                return
            calm_s = self.faults.calm_since_s
            if calm_s is not None and engine.now_s > calm_s + CALM_S:
                raise Violation(f"I5: no end {CALM_S:.0f} s after the last fault")
        state = self.store.last
        if state.phase is not JobPhase.COMPLETE:
            raise Violation(f"I5: the job is {state.phase}: {state.outcome}")
        self.checks.finished(state)

    def _is_known(self) -> bool:
        """Whether some pod knows the job; else only who made it can make it again."""
        return any(
            pod.supervisor.alive and pod.supervisor.state.registered for pod in self.pods.values()
        )

    def describe(self) -> str:
        """Return who waits for whom."""
        state = self.store.last
        quorum = state.plan.quorum if state.plan else None
        job = f"job: {state.phase}, step {state.step}, plan {quorum}, "
        lines = [job + f"suspicion {state.suspicion}, waiting {state.waiting}"]
        members = {str(m.incarnation): m for m in state.plan.members} if state.plan else {}
        for name, trainer in self.trainers.items():
            if not trainer.alive and name not in members:
                continue
            seat = f"member {members[name].index} {members[name].rank}" if name in members else "-"
            newest = trainer.connections.newest
            what = "dead" if not trainer.alive else "stopped" if trainer.stopped else "lives"
            settled = "settled" if self._settled(trainer) else "not settled"
            lines.append(
                f"  {name:<8} on {trainer.node:<6} {seat:<20} {what}, {trainer.state.phase} v"
                f"{trainer.state.version} in {trainer.quorum} ({settled}), waits in "
                f"{trainer.waits_in}, newest plan seen {newest.quorum if newest else None}"
            )
        for pod in self.pods.values():
            slots = ", ".join(str(s.phase) for s in pod.supervisor.state.slots)
            alive = "lives" if pod.supervisor.running else "is gone or stopped"
            lines.append(f"  {pod.uid} {alive}: {slots}")
        return "\n".join(lines)

    @staticmethod
    def _settled(trainer: Trainer) -> bool:
        return trainer.quorum is not None and trainer.state.settled == trainer.quorum.id


def simulate(scenario: Scenario, *, tracing: bool = False) -> Outcome:
    """Run a scenario to its end."""
    return World(replace(scenario), tracing=tracing).run()
