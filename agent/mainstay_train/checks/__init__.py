"""Executes the kernels of a trainer's work twice, compares bits, and repairs what differs.

- ``kernels``: what a call of torch's dispatcher reads and writes
- ``regions``: the bytes of memory that a view of a tensor covers
- ``twins``: copies of the memory that a call overwrites
- ``bits``: compares tensors bit by bit, and changes single bits
- ``places``: where in the program a kernel is
- ``flips``: wrong bits that faults have ordered, until their kernel comes
- ``collectives``: executes what inner ranks compute together a second time
- ``checker``: executes each kernel a second time, and a third one where two differ
"""
