"""One run: the job, its pods, its api, and somebody who replaces what is lost."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

from mainstay_core.base.errors import MainstayError
from mainstay_core.base.ids import Incarnation, PodUid
from mainstay_core.coordinator import machine
from mainstay_core.job.phase import JobPhase
from mainstay_core.sim.api import Api
from mainstay_core.sim.checks import Checks
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.engine import Engine, Violation
from mainstay_core.sim.faults import Faults
from mainstay_core.sim.network import Network
from mainstay_core.sim.provider import MAX_PODS, Pod, Provider
from mainstay_core.sim.scenario import PLANNED, Pace, Scenario
from mainstay_core.sim.store import Store
from mainstay_core.sim.trainer import Trainer
from mainstay_core.sim.wishes import Wishes
from mainstay_core.wire.plan import Plan

CALM_S = 240.0
"""Once faults are over and everything can be replaced, a job must finish within so long."""
PLANS, PLANS_PER_FAULT = 12, 24
PODS_PER_SUSPENSION = 16
FOLLOWED = ("drain", *PLANNED)
"""With these, the number of pods is what the api wants."""


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
        self.disk = Disk(len(shape.positions))
        max_plans = PLANS + PLANS_PER_FAULT * len(scenario.faults)
        self.checks = Checks(shape, max_plans, self.disk)
        self._skew_s: dict[str, float] = {}
        self._num_names = 0
        state = machine.initial(self.config, self.clock("api0"))
        self.store = Store(self.engine, self.network, state, self.checks)
        self.trainers: dict[str, Trainer] = {}
        kinds = [f.kind for f in scenario.faults]
        self.provider = Provider(
            self,
            follows=any(kind in FOLLOWED for kind in kinds),
            max_pods=MAX_PODS + PODS_PER_SUSPENSION * kinds.count("suspend"),
        )
        self.wishes = Wishes(self)
        self.api_nodes = [f"api{i}" for i in range(scenario.apis)]
        self.apis: dict[str, Api] = {}
        self._api_lives = 0
        for node in self.api_nodes:
            self.start_api(node)
        self.provider.begin(-(-shape.num_ranks // self.slots_per_pod) + self.config.spares)
        self.store.remembers = "store-fallback" in kinds
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

    @property
    def newest_plan(self) -> Plan | None:
        """The plan that became durable last."""
        return self.checks.plans[-1] if self.checks.plans else None

    @property
    def pods(self) -> dict[str, Pod]:
        """The pods that there are."""
        return self.provider.pods

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
            gone = self.store.data.state is None and not self.provider.follows
            if gone and not self._is_known():
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
