"""Simulates whole jobs: the real state machines run in played surroundings, from one seed.

:func:`draw` makes a scenario of a seed. :func:`simulate` runs it and names the first
invariant of the protocol that did not hold, if any.

- ``engine``: a clock that jumps, processes that die, tasks that wait
- ``network``: connections that delay, stall, cut and reset
- ``terms``: canonical terms that stand for numbers
- ``disk``: the directory of checkpoints
- ``scenarios/``: the job, surroundings and faults of a run, drawn from a seed
- ``invariants/``: what must hold after every change
- ``gather``: the sockets of the gather
- ``groups``: process groups and their rendezvous
- ``compute``: the arithmetic of a position, on terms
- ``store``: the server that stores the job
- ``surroundings``: what surrounds every process of a run
- ``segments``: a pod's store of segments
- ``trainers/``: trainers and what they keep and copy
- ``services/``: the api, pods and people
- ``stage``: everybody who plays in a run
- ``memory_faults``: faults of what pods keep in memory
- ``parting``: two replicas that go different ways under one number of a lineage
- ``faults``: faults that strike at a moment or at a place in the code
- ``world``: one run
"""

from __future__ import annotations

from mainstay_core.sim.scenarios.drawing import draw
from mainstay_core.sim.scenarios.scenario import KINDS, Fault, Scenario
from mainstay_core.sim.world import Outcome, World, simulate

__all__ = ["KINDS", "Fault", "Outcome", "Scenario", "World", "draw", "simulate"]
