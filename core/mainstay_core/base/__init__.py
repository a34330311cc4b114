"""Holds what everything else is made of: identities, errors, and bytes with their digests.

- ``bounds``: the bounds of values from the wire, as types
- ``ids``: names of jobs, pods, slots, ranks, lives of processes, and quorums
- ``errors``: the tree of exceptions
- ``shape``: the shape of a job: stages, lanes and ranks, which never change while it lives
- ``codec``: values to JSON and back
- ``field_texts``: the JSON of a large value of which little has changed
- ``lookup``: values of a tuple by their keys
- ``values``: changed copies of frozen values
- ``frames``: length-prefixed frames on a socket
- ``dealing``: items of different weights, dealt out to parties
- ``digest``: the one digest of tensors
- ``release``: the version
- ``logs``: the one format of our containers' logs
- ``names``: the natural order of names, in which numbers count as such
- ``words``: numbers with their nouns, and quoted values, for sentences
- ``proofs``: proofs by which two ends of a connection show that they know the job's secret
- ``admission``: bounds on connections that have proved nothing yet
- ``backoff``: pauses between tries, each twice as long as the one before
- ``allowance``: bounds on how much one asks of a server in a time
"""
