"""Plays a trainer of a simulated run: the real machine of a rank, with terms for tensors.

- ``connections``: the connections of a trainer under its plan
- ``heal``: copies of state
- ``saving``: what a trainer reads from the disk and writes to it
- ``segment_client``: a trainer's ways to stores of segments
- ``boundary_replayer``: a lost stage's steps, computed again from boundary logs
- ``replayer``: a lost state, made anew from logged gradients
- ``replay_segments``: the segments that a replay reads and writes
- ``owner``: a simulated trainer, as its keeper of segments sees it
- ``keeper``: what a trainer keeps in the memory of pods, and makes anew from it
- ``guarding``: a trainer as a guard of what ends of the pipeline alone have
- ``trainer``: what a rank's session needs, played
- ``launcher``: the shell of a pod's launcher
"""
