"""Plans which operators are executed again and when, so that a wrong result is seen.

- ``operators``: operators of a stage, their tensors, and the graph of both
- ``profiles``: a stage's operators, recomputes and windows, as JSON
- ``questions``: a stage of a job that a process with torch is to profile
- ``plan``: pieces that are executed again together, what they compare, what they cost
- ``coverage``: the rule that a plan must keep, and what a planner must compare to keep it
- ``piggyback``: phase 1, recomputes as checks
- ``segments``: phase 2, parts of blocks that are replayed in a later window
- ``fits``: the checks that fill a window best
- ``queue``: phase 3, single operators
- ``static``: the three phases together
- ``dynamic``: the same decisions while a step runs, for operators without fixed shapes
- ``verdicts``: which of three executions was wrong, and what is done about it

It is dual modular redundancy (DMR) as SpareTrain plans it, with a stricter rule of what is
compared. Nothing executes these plans yet. The standard library is enough: trainers will plan.
"""
