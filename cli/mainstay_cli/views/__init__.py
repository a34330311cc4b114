"""Shows a running job in a terminal.

- ``monitor``: follows a job through the api
- ``progress``: prints steps, recoveries and warnings, line by line
- ``live``: a live table
- ``sizes``: a table of what ranks hold and send
- ``snapshot_plan``: tables of forecasts, and of a paper's numbers beside ours
- ``faults``: short texts for an injected fault
"""
