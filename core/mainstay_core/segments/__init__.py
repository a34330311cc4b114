"""Decides what a pod's store of segments keeps, where it lies in memory, and who has confirmed it.

- ``frames``: what trainers and other pods say to a store, and what it answers
- ``spans``: places in an arena of a fixed size
- ``boundary_votes``: the votes that rest on what crossed the boundary of a stage
- ``evictions``: what of a full store goes, so that the window in flight finds room
- ``report_sizes``: how many bytes it takes to tell what a store holds
- ``records``: the commits beside the segments of one store
- ``kept``: segments by key, and those that no key finds any more
- ``index``: the segments of one store
- ``deliveries``: one segment on its way to its holders
- ``status``: what a store tells the api: what it holds in short, and the checksums of a check

The supervisor drives it over sockets, trainers speak its frames. A segment counts only when all its
bytes are there. Nothing here chooses: a writer names the holders and says what is needed no more.
"""
