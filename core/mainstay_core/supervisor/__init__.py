"""Decides when a pod's trainers are forked, killed and given up, and what the pod says to whom.

- ``state``: what a supervisor knows of its slots, and the limits that it keeps
- ``events``: what happens to a supervisor, and what its shell is told to do
- ``slots``: the states of one slot, and the table of their transitions
- ``leaving``: how a pod that is told to end hands its work over first
- ``machine``: the supervisor's state machine
- ``outbox``: facts and ledger entries that wait to be heard
- ``held_job``: what is told to a store that has lost the job
- ``findings``: what trainers have found wrong, and waits to be heard
- ``conversation``: registration, facts, ledger, heartbeats and plans: what is said to the api
- ``gossip``: plans from supervisor to supervisor
- ``pod``: one pod without its sockets: all of the above, for a shell
- ``health``: the file that says how a supervisor is, and the probe that reads it
- ``launcher``: what the warm parent of a pod's trainers forks, signals and reports
"""
