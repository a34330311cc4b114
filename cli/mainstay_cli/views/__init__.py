"""Shows a running job in a terminal.

- ``monitor``: follows a job through the api
- ``progress``: prints steps, recoveries and warnings, line by line
- ``lineage``: the stages that were made anew from others, and since when the job is approximate
- ``live``: a live table
- ``sizes``: a table of what ranks hold and send
- ``snapshots``: what the stores of a running job hold, and what a check of them has found
- ``snapshot_plan``: tables of forecasts, and of a paper's numbers beside ours
- ``dmr_plan``: tables of a plan of checks
- ``faults``: short texts for an injected fault
"""
