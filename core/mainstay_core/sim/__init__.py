"""Simulates whole jobs: the real state machines run in played surroundings, from one seed.

:func:`draw` makes a scenario of a seed. :func:`simulate` runs it and names the first
invariant of the protocol that did not hold, if any.

- ``engine``: a clock that jumps, processes that die, tasks that wait
- ``network``: connections that delay, stall, cut and reset
- ``terms``: canonical terms that stand for numbers
- ``disk``: the directory of checkpoints
- ``groups``: process groups and their rendezvous
- ``gather``: the sockets of the gather
- ``heal``: copies of state
- ``compute``: the arithmetic of a position, on terms
- ``connections``: the connections of a trainer under its plan
- ``saving``: what a trainer reads from the disk and writes to it
- ``surroundings``: what surrounds every process of a run
- ``segments``: a pod's store of segments
- ``segment_client``: a trainer's ways to stores of segments
- ``units``: the units of a job, and their sizes
- ``boundary_replayer``: a lost stage's steps, computed again from boundary logs
- ``replayer``: a lost state, made anew from logged gradients
- ``keeper``: what a trainer keeps in the memory of pods, and makes anew from it
- ``trainer``: what a rank's session needs, played
- ``launcher``: the shell of a pod's launcher
- ``api_client``: a supervisor's way to the api
- ``supervisor``: the shell of a pod's supervisor
- ``store``: the server that stores the job
- ``streams``: the job's stream at one replica of the api
- ``api``: one replica of the api
- ``provider``: makes pods
- ``wishes``: suspensions and scalings that somebody asks for
- ``stage``: everybody who plays in a run
- ``faults``: faults that strike at a moment or at a place in the code
- ``pace``: how long each thing takes
- ``points``: the places at which a fault may strike
- ``scenario``: the job, surroundings and faults of a run
- ``drawing``: the scenario that a seed means
- ``kept_boundaries``: the boundary logs that were confirmed to be there
- ``kept``: what was confirmed to be in memory
- ``lineages``: what forks do to a job
- ``life``: what checks look at in a trainer
- ``checks``: the invariants
- ``world``: one run
"""

from __future__ import annotations

from mainstay_core.sim.drawing import draw
from mainstay_core.sim.scenario import KINDS, Fault, Scenario
from mainstay_core.sim.world import Outcome, World, simulate

__all__ = ["KINDS", "Fault", "Outcome", "Scenario", "World", "draw", "simulate"]
