"""Executes the kernels of a trainer's work twice, compares bits, and repairs what differs.

Begin with ``executions``: a scope sees each kernel that its thread calls. Who compares what two
executions have made is decided there: ``at_once`` before the value is used, ``waiting`` and
``late`` while the trainer waits for others, ``flags`` on a GPU before the vote, or ``recomputes``
where a forward runs again anyway. All of them tell ``checker`` what differed.

- ``budget``: refuses a budget that no device could hold
- ``places``: where in the program a kernel is
- ``flips``: wrong bits that faults have ordered, until their kernel comes
- ``collectives``: executes what inner ranks compute together a second time
- ``prices``: which kernels are executed twice for less than their imprints
- ``flags``: comparisons that stay on a device until a shard type is about to count
- ``at_once``: executes a call a second time before anybody has used its value
- ``by_piece``: executes fused optimizers twice, some elements at a time
- ``one_by_one``: executes a large kernel twice with one result at a time
- ``recomputes``: compares the recompute of a block with its forward
- ``planned``: which checks wait as a plan says, and who records what a plan is made from
- ``waiting``: checks that wait until their trainer waits for others
- ``late``: checks kernels after their values were used
- ``replays``: replays segments of blocks from their boundary tensors
- ``telling``: how checks are told of executions that differed
- ``sums``: executes the sums of a reduction, and the digests of a vote, twice as a whole
- ``scopes``: what may be asked of a part of the work that is checked
- ``judging``: what a scope asks of the checks of a trainer
- ``executions``: executes each kernel a second time, and a third one where two differ
- ``checker``: the checks of one trainer, and what they have found
"""
