"""Copies state: to peers that join, and to durable checkpoints.

- ``chunks``: a state in chunks of a fixed size
- ``heal``: copies the state of living cells to a joiner
- ``comparing``: compares a copy with the states of all who have it
- ``guards``: the blocks of other stages that a trainer guards
- ``beside``: copies states of other stages, of which this one is made anew
- ``serving``: says when this trainer's state may be copied
- ``arena``: the memory of this trainer's pod, as its store gives it
- ``store_connection``: connects a trainer to the store of segments of its pod
- ``rooms``: room in the memory of a pod's store, as a trainer asks for it
- ``segments``: writes segments into the memory of this trainer's pod
- ``segment_reader``: reads segments from the stores of other pods
- ``digest_client``: gives stores the digests of units in steps, and asks for those of replayed ones
- ``controller``: saves and loads checkpoints for the session
- ``host_copy``: copies a stage's state, through bounded host memory, to whoever writes it
- ``part_files``: the files of one part of a checkpoint
- ``versions``: a look at one version on the disk
- ``owner``: claims a directory of checkpoints for a job
- ``directory``: checkpoints on the disk
- ``verify``: computes every digest of a checkpoint again
- ``export``: writes a checkpoint for torch's own tools
- ``format_1``: reads checkpoints of format 1
- ``convert``: makes checkpoints of format 1 ones of format 2
"""
