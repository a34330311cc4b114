"""The surroundings of every process of a run: time, network, disk, store, and their checks."""

from __future__ import annotations

from typing import Any, Protocol

from mainstay_core.base.ids import Incarnation
from mainstay_core.control_plane.job_store import Change
from mainstay_core.coordinator import machine
from mainstay_core.sim.compute import Wrong
from mainstay_core.sim.disk import Disk
from mainstay_core.sim.engine import Engine, Process
from mainstay_core.sim.invariants.checks import Checks
from mainstay_core.sim.network import Network
from mainstay_core.sim.scenarios.pace import Pace
from mainstay_core.sim.scenarios.scenario import Scenario
from mainstay_core.sim.store import Store
from mainstay_core.wire.plan import Plan


class Strikes(Protocol):
    """The places in a process's code where a fault may strike; it raises if that ends it."""

    def reach(self, trainer: Any, point: str) -> None:
        """A trainer is at a point."""

    def reach_api(self, api: Process, change: Change, point: str) -> None:
        """An api replica is about to commit a change, or has just done it."""

    def goes_wrong(self, trainer: Any, shard_type: int) -> Wrong | None:
        """Return how what a trainer computes next of a type comes out wrong, if it does."""

    def corrupt_gradient(self, trainer: Any, compute: Any) -> None:
        """A trainer has reduced a gradient."""

    def corrupt_guard(self, trainer: Any) -> None:
        """A trainer is about to apply a step to what it guards."""

    def corrupt_state(self, trainer: Any, compute: Any) -> None:
        """A trainer has applied a step."""


class Surroundings:
    """The surroundings that the processes of one run share.

    Args:
        scenario: what is drawn of the seed.
        max_plans: more than so many plans are a storm.
        tracing: whether a trace is kept.
    """

    faults: Strikes

    def __init__(self, scenario: Scenario, max_plans: int, *, tracing: bool) -> None:
        self.scenario, self.config = scenario, scenario.config
        self.slots_per_pod = scenario.slots_per_pod
        self.engine = Engine(scenario.seed, tracing=tracing)
        self.pace = Pace(rng=self.engine.rng, block=scenario.block_s)
        self.network = Network(self.engine, scenario.latency)
        self.disk = Disk(len(self.config.shape.positions))
        self.checks = Checks(self.config, max_plans, self.disk, scenario.num_units)
        self._skew_s: dict[str, float] = {}
        self._num_names = 0
        state = machine.initial(self.config, self.clock("api0"))
        self.store = Store(self.engine, self.network, state, self.checks)
        self.api_nodes = [f"api{i}" for i in range(scenario.apis)]
        self.trainers: dict[Incarnation, Any] = {}
        """Every life of a trainer, dead ones too (``Trainer``, which stands above this)."""

    def clock(self, node: str) -> float:
        """Return the wall clock of a node."""
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

    @property
    def newest_plan(self) -> Plan | None:
        """The plan that became durable last."""
        return self.checks.plans[-1] if self.checks.plans else None
