"""Everybody who plays in a run beside the trainers: who makes pods, who owns the job, the api."""

from __future__ import annotations

from mainstay_core.sim.scenarios.scenario import PLANNED, Scenario
from mainstay_core.sim.services.api import Api
from mainstay_core.sim.services.provider import MAX_PODS, Pod, Provider
from mainstay_core.sim.services.wishes import Wishes
from mainstay_core.sim.surroundings import Surroundings

PLANS, PLANS_PER_FAULT = 12, 24
PODS_PER_SUSPENSION = 16
FOLLOWED = ("drain", *PLANNED)
"""With these, the number of pods is what the api wants."""


class Stage(Surroundings):
    """The surroundings of one run, and who plays in them.

    Args:
        scenario: what is drawn of the seed.
        tracing: whether a trace is kept.
    """

    def __init__(self, scenario: Scenario, *, tracing: bool) -> None:
        max_plans = PLANS + PLANS_PER_FAULT * len(scenario.faults)
        super().__init__(scenario, max_plans, tracing=tracing)
        kinds = [f.kind for f in scenario.faults]
        self.provider = Provider(
            self,
            follows=any(kind in FOLLOWED for kind in kinds),
            max_pods=MAX_PODS + PODS_PER_SUSPENSION * kinds.count("suspend"),
        )
        self.wishes = Wishes(self.provider)
        self.apis: dict[str, Api] = {}
        self._api_lives = 0
        for node in self.api_nodes:
            self.start_api(node)
        num_ranks = self.config.shape.num_ranks
        self.provider.begin(-(-num_ranks // self.slots_per_pod) + self.config.spares)
        if scenario.ahead is not None:
            self.wishes.allow_ahead(scenario.ahead)
        self.store.remembers = bool({"store-fallback", "part-ways"} & set(kinds))

    def start_api(self, node: str) -> None:
        """Start a replica, or another life of it."""
        self._api_lives += 1
        self.apis[node] = Api(self, node, self._api_lives)

    @property
    def pods(self) -> dict[str, Pod]:
        """The pods that there are."""
        return self.provider.pods
