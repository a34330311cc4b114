"""Holds what every command needs: exit codes, addresses, the state directory, the api's client.

- ``exits``: exit codes and errors of commands
- ``entry``: how a command line begins and ends
- ``client``: the api over HTTP
- ``comparison``: compares the reports of two runs
- ``reports``: reads the report of an ended run by the types of what is shown
- ``logs``: what an ended process said last
- ``network``: loopback addresses for pods
- ``state_dir``: where a run keeps its files
- ``files``: writes a file as a whole
- ``guard``: runs one command that ends when its parent is gone
"""
