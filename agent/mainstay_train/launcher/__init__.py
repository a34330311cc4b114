"""Starts trainers: a warm parent with torch imported forks one for each slot.

- ``launcher``: the launcher of one pod
- ``warming``: prepares a process for forks: torch is imported once
- ``main``: the entry of a trainer process
- ``forge``: forks the launchers of local mode from one process
"""
