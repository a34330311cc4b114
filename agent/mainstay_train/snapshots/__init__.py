"""Keeps the state of a stage in the memory of pods, and makes a lost one anew from there.

- ``unit_bytes``: the units of a stage's state and gradient, as bytes of segments
- ``pace``: how fast this trainer copies, and over how many versions it would spread a snapshot
- ``keeper``: writes the segments that a plan asks of this trainer
- ``replayer``: makes a position's state anew from segments
"""
