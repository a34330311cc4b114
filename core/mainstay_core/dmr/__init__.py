"""Plans which operators are executed again and when, so that a wrong result is seen.

- ``settings``: what a job wants of checks
- ``operators``: operators of a stage, their tensors, and the graph of both
- ``profiles``: a stage's operators, recomputes and windows, as JSON
- ``plan``: pieces that are executed again together, what they compare, what they cost
- ``coverage``: the rule that a plan must keep, and what a planner must compare to keep it
- ``piggyback``: phase 1, recomputes as checks
- ``segments``: phase 2, parts of blocks that are replayed in a later window
- ``fits``: the checks that fill a window best
- ``queue``: phase 3, single operators
- ``static``: the three phases together
- ``schedule``: what a trainer does of a plan
- ``merging``: the profile from which all ranks of a cell plan
- ``dynamic``: the same decisions while a step runs, for operators without fixed shapes
- ``witness``: where chains that computed the same type differ, and which device was wrong
- ``devices``: which slots may be one device
- ``accounts``: what a cell tells of a type that others compute, too
- ``verdicts``: which of three executions was wrong, and what is done about it
- ``findings``: what a trainer tells of a mismatch
- ``flips``: wrong bits that faults put into what operators compute

It is dual modular redundancy (DMR) as SpareTrain plans it, with a stricter rule of what is
compared. The standard library is enough, as trainers plan.
"""
