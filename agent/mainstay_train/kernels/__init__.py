"""Tells what a call of a torch kernel reads and writes, compares its bits, and repeats it.

- ``dispatch``: what a call of torch's dispatcher reads and writes
- ``regions``: the bytes of memory that a view of a tensor covers
- ``twins``: copies of the memory that a call overwrites
- ``bits``: compares tensors bit by bit, and changes single bits
- ``calls``: keeps a call so that it can be executed again, and repairs what it made wrongly
- ``imprints``: what is left of tensors that are compared later
"""
