"""Records the operators of a stage from its own passes, for the planners of checks.

- ``contents``: the names of what lies in memory, as operators write it
- ``timers``: how long operators take on a device
- ``recorder``: sees each operator of a passage, and what it reads and writes
- ``passage``: takes a micro-batch through a stage, as a trainer does
- ``profiler``: makes a profile of several recorded passages
- ``cells``: the ranks of a cell tell each other what they have measured
- ``ordered_plans``: reads the plan of checks that a job names
- ``recordings``: records one passage of a trainer's program, and how long that waits
- ``run_planner``: makes a trainer's plan of checks from its first steps
- ``answer``: profiles a stage of a job in a process of its own
- ``played_exchanges``: what the cells of a stage send each other, where they are in one process
- ``played_cells``: cells of a stage in one process, which reduce, vote, and heal
- ``cell_trials``: puts wrong bits on the wire and into states of such cells
- ``flip_trials``: computes a step again and again, each time with a wrong bit drawn from a seed

Nothing here changes a bit of what is recorded.
"""
