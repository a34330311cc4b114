"""Keeps the segments of a pod in its memory: for its trainers, and for other pods of the job.

- ``arena``: the memory itself, which trainers map as well
- ``channel``: frames over one socket that does not block, bodies straight from and to the arena
- ``callers``: a pod that has called: its store sends segments, or a trainer reads some
- ``holders``: a connection to the store of another pod, to which segments are sent
- ``trainers``: a trainer of this pod, over a Unix socket
- ``check``: reads every segment once, where somebody asks for it
- ``store``: the thread that waits for all of them

What is kept is decided in :mod:`mainstay_core.segments`. No byte of a segment passes through
Python: trainers write into the arena, and the kernel sends from it and receives into it.
"""
