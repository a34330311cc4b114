"""Keeps the state of a stage in the memory of pods, and makes a lost one anew from there.

- ``unit_bytes``: the units of a stage's state and gradient, as bytes of segments
- ``measurements``: how fast this trainer copies, and how long its steps take
- ``writer``: writes segments into the memory of this trainer's pod
- ``sent_log``: logs what a stage gives its neighbours
- ``good_copies``: reads segments for a replay, each from a holder whose copy is as it was written
- ``vote_checks``: compares what a replay makes with what votes said of it
- ``unit_checks``: compares the units that a replay has made with what votes told of each
- ``replayer``: makes a position's state anew from copies and gradients
- ``inputs``: reads ahead what neighbours sent, while a replay computes
- ``boundary_replayer``: makes a position's state anew by computing its steps again
- ``keeper``: writes the segments that a plan asks of this trainer, and has a state made anew
"""
