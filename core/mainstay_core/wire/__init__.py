"""Describes every message that travels between trainers, supervisors, the api and the disk.

- ``reinitialisation``: from what a lost state is made anew that nobody holds any more
- ``plan``: the plan: members of a quorum, their chains, and who computes what
- ``windows``: what ranks measure and count, from which windows of snapshots are planned
- ``votes``: votes, commits and settle reports
- ``unit_digests``: digests of a position's units in a step, by which its replays are compared
- ``segments``: what pods keep in memory of states and gradients
- ``stores``: what a pod's store of segments tells the api, and what losses a job survives by it
- ``ledger``: digests of committed steps
- ``recoveries``: the record of a recovery and its five times
- ``findings``: what checks by re-execution have found
- ``taints``: which steps a device may have computed wrongly
- ``crashes``: the exception that ended a trainer's program
- ``formats``: which formats are understood, and what format 1 says in other words
- ``rules``: the number of the rules by which trainers decide: those of a job have the same
- ``facts``: what pods tell the api: registrations, heartbeats and facts
- ``page``: what the api tells the operator: a job on one page, and the pods that it wants
- ``flip_trials``: drawn wrong bits in steps that a process with torch is to compute, and its answer
- ``profiling``: a stage of a job that a process with torch is to profile, and its answer
- ``api``: what a supervisor asks of the api, what it is answered, and what a failed request means
- ``routes``: the api's routes as programs call them
- ``sealed``: small files that carry their own digests
- ``checkpoint_manifest``: what lies in a directory of durable checkpoints
- ``checkpoint_owner``: which job may write to such a directory
- ``repeated_lineage``: the forks of another run, as a run takes them that makes them again
"""
