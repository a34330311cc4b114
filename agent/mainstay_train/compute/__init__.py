"""Runs the program of a step on one stage: forward, backward, reduce, apply.

- ``engine``: state, partials and reducer of one cell, and what computes with them
- ``comparisons``: what cells compare of their states and of what they send each other
- ``at_rest``: puts wrong bits of faults into the state
- ``statistics``: gathers what a vote says of a shard type
- ``held``: the complete types of a step, and which of them are wrong
- ``loader``: loads batches one micro-batch ahead, on a thread of their own
- ``batches``: takes the batches of a program one after the other
- ``boundaries``: who keeps what crosses a stage's boundaries, and gives it back in a replay
- ``arrivals``: waits for messages of the pipeline, and has checks executed meanwhile
- ``transfers``: sends and receives what goes from stage to stage
- ``micro_batch``: one micro-batch on its way through the stage
- ``cell_checks``: has the ranks of a cell check alike what they execute together
- ``interpreter``: runs the compute part of a step's program
- ``watched``: digests of what leaves a cell for a type that other chains compute, too
- ``doubts``: remembers what blocks raised in a step that is checked
- ``purity``: tries whether blocks are pure functions, as checks take them to be
- ``training``: builds engines, for a session
- ``measure``: measures what a workload's blocks take, by one micro-batch
"""
