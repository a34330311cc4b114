"""Runs the program of a step on one stage: forward, backward, reduce, apply.

- ``engine``: state, partials and reducer of one cell, and what computes with them
- ``comparisons``: what cells compare of their states and of what they send each other
- ``statistics``: gathers what a vote says of a shard type
- ``held``: the complete types of a step, and which of them are wrong
- ``loader``: loads batches one micro-batch ahead, on a thread of their own
- ``interpreter``: runs the compute part of a step's program
- ``watched``: digests of what leaves a cell for a type that other chains compute, too
- ``training``: builds engines, for a session
- ``measure``: measures what a workload's blocks take, by one micro-batch
"""
