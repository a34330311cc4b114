"""Connects the ranks of a job, and lets any thread end a connection that another waits in.

- ``group``: process groups whose blocked operations another thread can end
- ``operations``: messages and exchanges on their way
- ``meeting``: the meeting place of a group's ranks, where they tell each other how they are reached
- ``backend``: what a library must offer that carries the tensors of a group
- ``ending``: waits for what is left of process groups that have ended, and lets go of them
- ``gloo``: the gloo backend of a group
- ``nccl``: the NCCL backend of a group
- ``interruptible``: collectives of an inner mesh over gloo, whose waits end with their group
- ``mesh``: the ranks of one cell, on which the user's parallelism runs
- ``chains``: the groups of one chain: pipeline and inner mesh
- ``registered``: connections that belong to no group, and frames read from them
- ``gather_client``: a member's side of the gather
- ``connections``: all connections of a trainer under the plan it has adopted
"""
