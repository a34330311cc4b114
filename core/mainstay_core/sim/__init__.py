"""Whole jobs in simulated time: real decisions, simulated shells, everything from one seed.

The coordinator, the supervision and the rank are the state machines of this
package; around them stand small copies of the real shells (trainers, supervisors,
launchers, the api and its store) on a network that delays, cuts and resets.
:func:`draw` makes a scenario of a seed, :func:`simulate` runs it and says which
invariant of the protocol did not hold, if any.
"""

from __future__ import annotations

from mainstay_core.sim.scenario import KINDS, Fault, Scenario, draw
from mainstay_core.sim.world import Outcome, World, simulate

__all__ = ["KINDS", "Fault", "Outcome", "Scenario", "World", "draw", "simulate"]
