"""Says which lost states can be made anew from what pods keep in memory, and how.

- ``authors``: which units a member copies, and which pods hold the copies
- ``told_records``: by which record of a commit a replay goes
- ``replaying``: which states can be made anew from what pods keep in memory, and how
- ``boundaries``: how the members of lost stages compute their steps again from boundary logs
- ``boundary_stores``: which states of lost stages can be computed again from boundary logs
"""
