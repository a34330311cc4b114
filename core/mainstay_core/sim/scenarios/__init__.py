"""Says what a simulated run is: a job, its surroundings and its faults, drawn from a seed.

- ``scenario``: the job, surroundings and faults of a run
- ``points``: the places at which a fault may strike
- ``pace``: how long each thing takes
- ``ordering``: in which order micro-batches pass the stages
- ``fault_draws``: faults, alone or as a loss with what strikes while it is mended
- ``drawing``: the scenario that a seed means
"""
