"""Checks the invariants of the protocol in a simulated run, after every change.

- ``holding``: how they raise what does not hold
- ``life``: what checks look at in a trainer
- ``units``: the units of a job, and their sizes
- ``kept_boundaries``: the boundary logs that were confirmed to be there
- ``kept``: what was confirmed to be in memory
- ``permissions``: what a person allows ahead is used once
- ``sources``: whether what a plan orders to be made anew can be made
- ``lineages``: what forks do to a job
- ``named``: devices that were named leave, and their steps are told
- ``voided``: nobody goes on from what counts no more
- ``quorum_ends``: that nobody enters a quorum that has ended
- ``checks``: the invariants
"""
