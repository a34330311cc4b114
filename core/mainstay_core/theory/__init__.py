"""Predicts how much of its time a job trains under failures: closed forms, and runs over traces.

- ``iteration``: what a step takes, from its profiled parts
- ``profiles``: what must be known of a job
- ``ettr``: the effective training time ratio in closed form, and the best interval
- ``traces``: moments of failures, drawn or read
- ``policies``: when snapshots are taken, and what a failure costs then
- ``runs``: a run over a trace under a policy
- ``sizes``: bytes of snapshots and logs
- ``popularity``: tokens of experts, with a given skewness
- ``replay_lengths``: steps and computation of a replay
- ``model_units``: the units of a profiled job
- ``built``: windows of a profiled job, planned as in a running one
- ``built_replays``: replays of lost stages, planned as in a running job
- ``built_memory``: memory of a job's stores, planned as in a running one
- ``forecasts``: what each policy makes of a job
- ``comparison``: a printed number beside ours
- ``paper_jobs``: the MoEvement paper's jobs as profiles
- ``paper_tables``: what its tables print
- ``size_sections``: its windows, bytes and skewness beside ours
- ``ratio_sections``: its ETTR, recoveries and intervals beside ours
- ``figure_sections``: its figures beside ours
- ``built_sections``: its windows beside those that are built
- ``paper``: all of these comparisons
"""
