"""Describes a run: the job, its surroundings, and the faults that it meets."""

from __future__ import annotations

from dataclasses import dataclass, field

from mainstay_core.base.shape import Order
from mainstay_core.base.words import count
from mainstay_core.job.config import JobConfig
from mainstay_core.sim.network import Latency

KINDS = (
    "kill-trainer",
    "kill-pod",
    "kill-meeting",
    "kill-supervisor",
    "kill-launcher",
    "kill-replica",
    "kill-all-but-one",
    "kill-stage",
    "kill-two",
    "kill-all",
    "node-loss",
    "stop",
    "stop-pod",
    "cut-pod",
    "cut-api",
    "cut-one-way",
    "reset",
    "slow",
    "corrupt-gradient",
    "corrupt-state",
    "kill-api",
    "store-outage",
    "store-flush",
    "store-fallback",
    "leave",
    "drain",
    "flap",
    "damage-checkpoint",
    "suspend",
    "scale",
    "bad-source",
    "damage-segment",
    "corrupt-type",
    "break-chain",
    "corrupt-unseen",
    "stick",
    "kill-inner",
    "stop-inner",
    "corrupt-guard",
    "mute-stores",
)
"""Every kind of fault; :mod:`mainstay_core.sim.faults` says what each does."""

PLANNED = ("suspend", "scale")
"""No faults, but wishes: drawn beside the others, so that these mean the same without them."""

LASTING = ("bad-source",)
"""Faults that never end, so that a recovery from them repeats itself. Drawn apart, like wishes."""
CHECKED = ("corrupt-type", "break-chain")
"""A value that comes out wrong, which a check finds before the vote or a settle report, when others
have used it; and what has some of these get to the vote no more. Drawn apart, like wishes."""
IN_MEMORY = ("damage-segment",)
"""Faults of what pods keep in memory. A seed that may meet them may have snapshots, drawn apart."""


WITNESSED = ("corrupt-unseen", "stick")
"""Values that come out wrong as no check of the device sees: once, or always. They are played
alone, in types that a second chain computes, too: nothing else could find them."""

FORKING = ("kill-inner", "stop-inner")
"""Losses of all cells of a stage that has two neighbours. A seed that may meet them may be a job
with such stages, mostly with permission to make one anew, drawn apart."""

GUARDED = ("corrupt-guard",)
"""A copy of a guard that is wrong from some step on: the next vote finds it. Drawn apart, where
there are guards."""

SILENT = ("mute-stores",)
"""Stores of segments that do not answer the next question of another pod. Drawn apart, where there
are snapshots."""

APART = (*SILENT, *GUARDED, *PLANNED, *LASTING, *IN_MEMORY, *CHECKED, *WITNESSED, *FORKING)
"""Kinds that are not drawn among the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: what, and when.

    It is armed once the one before it has struck, so that several meet in one recovery.
    """

    kind: str
    at_s: float | None = None
    """Seconds after it was armed; or at a point:"""
    point: str = ""
    times: int = 1
    """The how-manieth pass of the point."""
    lasts_s: float = 0.0
    """Of what ends: a stop, a cut, an outage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """A permission that a person gives as soon as the job takes it: before anything is lost."""

    at_s: float = 0.0
    """From when on it is offered."""
    after_lost_steps: int
    withdrawn_after_s: float | None = None
    """Seconds until it is taken back; None: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything about a run but the dice thrown in it."""

    seed: int
    config: JobConfig
    slots_per_pod: int = 1
    apis: int = 1
    latency: Latency = field(default_factory=Latency)
    block_s: tuple[float, float] = (0.005, 0.03)
    """A forward or backward of one micro-batch: least, most."""
    skew_s: float = 0.0
    """Clocks of pods differ by up to so much; those of the api by a hundredth."""
    restarts_in_place: bool = False
    """A pod whose supervisor ended gets another one, as in Kubernetes; else it is replaced."""
    units: int = 1
    """The most units that a position has."""
    faults: tuple[Fault, ...] = ()
    ahead: Ahead | None = None
    """What a person allows whose job has no policy; None: nothing."""

    def num_units(self, position: int) -> int:
        """Return the units of a position."""
        return 1 + position % self.units

    def describe(self) -> str:
        """Return the scenario in a few lines."""
        shape = self.config.shape
        lines = [
            f"seed {self.seed}: {shape.lanes} lanes x {shape.shards_per_lane} types,",
            f"{shape.stages} stages x {shape.ranks_per_stage} ranks,",
            *(["swapped,"] if shape.order is Order.SWAPPED else []),
            f"{shape.micro_batches} micro-batches, {shape.steps} steps,",
            f"a checkpoint every {shape.checkpoint_every_steps} steps,",
            f"{self.slots_per_pod} slots per pod, {self.config.spares} spare pods, {self.apis} api",
        ]
        snapshots = self.config.snapshots
        if snapshots is not None:
            lines.append(
                f"snapshots over {snapshots.num_instalments or 'as many as wanted'} versions of up "
                f"to {self.units} units, on {snapshots.peers} other pods, and logs of "
                f"{'boundaries' if snapshots.boundary else 'gradients'}"
            )
        approximate = self.config.approximate
        if approximate is not None:
            lines.append(
                f"a stage may be made anew rather than lose {approximate.after_lost_steps} steps,"
            )
            lines.append(f"weights {approximate.weights}, boost {approximate.lr_boost},")
            lines.append(f"optimizer state {approximate.optimizer_state}")
            if self.config.guards:
                lines.append(f"{count(self.config.guards, 'guard')} of each end")
        if self.ahead is not None:
            back = self.ahead.withdrawn_after_s
            taken = "" if back is None else f", and takes it back {back:.2f} s later"
            steps = count(self.ahead.after_lost_steps, "step")
            lines.append(f"a person allows one fork rather than lose more than {steps}{taken}")
        lines = [" ".join(lines)]
        for fault in self.faults:
            when = f"after {fault.at_s:.2f} s" if fault.at_s is not None else ""
            when = when or f"at {fault.point}, pass {fault.times}"
            lasts = f", for {fault.lasts_s:.2f} s" if fault.lasts_s else ""
            lines.append(f"  {fault.kind} {when}{lasts}")
        return "\n".join(lines)
