"""Runs one rank: carries out what the rank's machine decides, and talks to the supervisor.

- ``guarding``: what a session does for guards, and as one
- ``session``: what core needs to carry out what the state machine decides
- ``checking``: checks by the rules that a plan says
- ``rules``: the rules by which the rank's machine decides, from the job and the model
- ``uplink``: the connection to the supervisor
- ``fault_points``: fires injected faults at named actions
- ``failing``: tells how a trainer's program ends before there is a session
- ``work``: what a user's loop computes at a time, compared where it comes twice
- ``loop``: the session that a user's own training loop gets
- ``driver``: runs a user's own loop under the state machine
"""
