"""Runs the program of a step on one stage: forward, backward, reduce, apply.

- ``engine``: state, partials and reducer of one cell, and what computes with them
- ``comparisons``: what cells compare of their states and of what they send each other
- ``statistics``: gathers what a vote says of a shard type
- ``loader``: loads batches one micro-batch ahead, on a thread of their own
- ``boundary_logs``: what keeps, and what gives, what crosses a stage's boundaries
- ``arrivals``: waits for messages of the pipeline, and has checks executed meanwhile
- ``micro_batch``: one micro-batch on its way through the stage
- ``interpreter``: runs the compute part of a step's program
- ``training``: builds engines, for a session
- ``measure``: measures what a workload's blocks take, by one micro-batch
"""
