"""Decides which pods to make and to end, which nodes to stay off, and what the status says of it.

- ``observed``: pods and nodes as plain values
- ``losses``: which pods are no more, and on what evidence
- ``memory``: remembers pods between two looks, so that every loss is told, and counted once
- ``repair``: which pods to make and to end, and what to tell the api
- ``counts``: how many pods of each sort there are, and what keeps some from starting
- ``quarantine``: which nodes a job stays off because their devices computed wrongly
- ``conditions``: the conditions and the state of a job, as people see them
"""
