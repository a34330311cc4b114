"""Decides who of a job lives, who is gone, and how the job goes on: facts come in, plans go out.

- ``state``: everything that is known of one job
- ``events``: what the coordinator learns, and what its shell is told to do
- ``machine``: the state machine: its table names who handles which event
- ``invariants``: what must hold of the state after every event
- ``reports``: takes in what pods, supervisors and the store report
- ``intake``: takes facts into the state, before anything is decided
- ``checkpoints``: what is known of durable checkpoints
- ``leaving``: pods that will end, and who announced it
- ``heartbeats``: how long pods have been silent
- ``backoff``: how long trainers that end again and again are kept out
- ``pruning``: drops what need not be known any longer
- ``recovery``: decides after a fault
- ``ladder``: which recovery method applies, and why
- ``planned``: decides between faults: hands over, drops, and fills places
- ``siting``: which free slots there are, and which serve together
- ``seating``: builds the next plan from trainers that are up
- ``suspension``: suspends a job and takes it up again
- ``scaling``: how many replicas are wanted
- ``submission``: what may change when a job is submitted again
- ``publishing``: makes a decision visible: a new plan, or the end of the job
- ``records``: the record of each recovery and its five times
- ``store_recovery``: what is believed when the store lost the job or fell back
- ``job_store``: what a store keeps of one job, and what its scripts do to that
- ``transactions``: makes decisions durable: load, decide, compare-and-set, and again
- ``problems``: how a refusal, or trouble with the store, is answered
- ``watch``: which jobs a replica of the api looks at for silence, and when
- ``injection``: injected faults: given, drawn for spares, recorded
"""
