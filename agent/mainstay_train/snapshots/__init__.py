"""Keeps the state of a stage in the memory of pods, and makes a lost one anew from there.

- ``unit_bytes``: the units of a stage's state and gradient, as bytes of segments
- ``measurements``: how fast this trainer copies, and how long its steps take
- ``keeper``: writes the segments that a plan asks of this trainer
- ``replayer``: makes a position's state anew from segments
"""
