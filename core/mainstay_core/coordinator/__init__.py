"""Decides who of a job lives, who is gone, and how the job goes on: facts come in, plans go out.

- ``state``: everything that is known of one job
- ``causes``: why quorums ended, as members told it, and what comes back
- ``events``: what the coordinator learns, and what its shell is told to do
- ``machine``: the state machine: its table names who handles which event
- ``invariants``: what must hold of the state after every event
- ``intake/``: takes facts into the state, before anything is decided
- ``fingerprints``: whose arithmetic differs from the job's
- ``leaving``: pods that will end, and who announced it
- ``forming``: decides on the first plan
- ``recovery``: decides after a fault
- ``ladder``: which recovery method applies, and why
- ``situation``: what the ladder is asked, and by what rules row 5 applies
- ``taints``: which steps a wrong device has computed, and when the job goes back before them
- ``lineage``: which forks the job's states contain, and from what each stage could be made anew
- ``permission``: whether a person may allow one approximate recovery, and what it would come to
- ``repeats``: what follows when the same cause comes back again and again
- ``planned``: decides between faults: hands over, drops, and fills places
- ``siting``: which free slots there are, and which serve together
- ``seats``: which trainer has which place, with copies of a position in several pods
- ``seating``: builds the next plan from trainers that are up
- ``suspension``: suspends a job and takes it up again
- ``scaling``: how many replicas are wanted
- ``submission``: what may change when a job is submitted again
- ``publishing``: makes a decision visible: a new plan, or the end of the job
- ``progress``: which steps are first commits, and the share of the time that they took
- ``records``: the record of each recovery and its five times
- ``injection``: injected faults: given, drawn for spares, recorded
"""
