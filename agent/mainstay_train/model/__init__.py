"""Describes what a user brings to train: blocks, loss, optimizer and data.

- ``workload``: loads the entrypoint and checks what it returns
- ``units``: parts of a block that are snapshotted and frozen alone
- ``block_spec``: the recipe of a block
- ``blocks``: pieces of a model between which only explicit tensors pass
- ``compilation``: blocks as code of torch's compiler
- ``trial``: tries each kind of block before a trainer says hello
- ``outline``: the blocks of every stage, as a re-initialisation sees them
- ``pipeline``: how the model is cut into stages, and what of that decides the bits
- ``job_units``: the units of all positions of a job, as windows of snapshots are planned of them
- ``losses``: losses that never hold all logits in fp32
- ``split``: modules whose backward computes input and weight gradients apart
- ``data``: samples by address, from folders of text files
- ``plain_model``: adopts a plain nn.Module into the flat layout
"""
