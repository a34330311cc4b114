"""Decides when a pod's trainers are forked, killed and given up, and what the pod tells of them.

- ``events``: what happens to a supervisor, and what its shell is told to do
- ``slots``: the states of one slot, and the table of their transitions
- ``leaving``: how a pod that is told to end hands its work over first
- ``machine``: the supervisor's state machine
"""
