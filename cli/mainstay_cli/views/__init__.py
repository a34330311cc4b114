"""Shows a running job in a terminal.

- ``monitor``: follows a job through the api
- ``progress``: prints steps, recoveries and warnings, line by line
- ``live``: a live table
- ``sizes``: a table of what ranks hold and send
- ``faults``: short texts for an injected fault
"""
