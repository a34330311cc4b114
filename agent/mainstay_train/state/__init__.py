"""Copies state: to peers that join, and to durable checkpoints.

- ``heal``: copies a living cell's state to a joiner
- ``serving``: says when this trainer's state may be copied
- ``controller``: saves and loads checkpoints for the session
- ``host_copy``: copies a stage's state to host memory at a step's boundary
- ``directory``: checkpoints on the disk
- ``verify``: computes every digest of a checkpoint again
"""
