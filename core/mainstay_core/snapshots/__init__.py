"""Plans which state is copied to whose memory, and how a lost state is computed from the copies.

- ``units``: what is copied by itself, and where in the buffers of its block it lies
- ``prices``: what a copy of a unit takes, from the types of its state
- ``windows``: in which step of a window each unit is copied (MoEvement's algorithm 1)
- ``measures``: how fast copies travel and how long a step takes, as all ranks agree on it
- ``orderings``: the order in which units are copied
- ``job_units``: the units of all positions of a job, and which of them are counted
- ``duties``: which living cell copies which units
- ``schedule``: a whole window: its length, and the instalments of every author
- ``copies``: whose stores hold what a cell copies
- ``stores``: which stores a plan names, and whether copies lack some
- ``recopies``: what a store sends again, after pods that kept it too have gone
- ``inventory``: what stores hold, and the answer that a replay lacks something
- ``coverage``: which losses positions survive, by what stores have told
- ``boundary_coverage``: how far stores bring lost stages by boundary logs, by what they have told
- ``checks``: which copies are damaged, by checksums that stores have told
- ``stretches``: which lost stages are replayed together
- ``boundary_replay``: from copies and logged activations to the state of lost stages

A *window* is a run of steps in which every unit of the model is copied once. The copies that one
author makes at one version are an *instalment*. Everything here is a function of what votes and
plans say, so all ranks compute the same. It needs the standard library alone: trainers import it.
"""
