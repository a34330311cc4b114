"""Answers requests: one file for each kind of caller or resource.

- ``agents``: what supervisors tell and ask
- ``jobs``: jobs, their ranks, recoveries and reports
- ``lineage``: which forks a job's states contain, and permissions to make stages anew
- ``snapshots``: what a job's snapshots hold, and whether the copies are good
- ``faults``: injected faults
- ``operator``: what the operator asks of a job
- ``health``: liveness and readiness
"""
