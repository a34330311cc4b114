"""Computes everything that the bits depend on, in an order that belongs to the model and the data.

- ``layout``: flat buffers and the fixed chunk grid
- ``slices``: the part of a tensor that an inner rank holds
- ``buckets``: cuts a flat gradient into what is reduced together
- ``reduction``: the sum of gradients over the cells of a stage
- ``early``: the same, while the last type is still computed
- ``wire_sums``: digests of what cells send each other in a reduction
- ``unit_sums``: where the units of a stage lie in flat buffers, and their digests
- ``gradients``: digest and norms of a reduced gradient, bucket by bucket
- ``eager_optimizers``: optimizers of torch that do not import its compiler
- ``masters``: digests of a stage's masters, of each unit by itself
- ``optimizer``: the update of a stage, and its state
- ``portions``: some blocks of a state
- ``blending``: a stage made of others, as a weighted sum
- ``numerics``: one arithmetic for all ranks of a job
- ``fingerprint``: what must be equal for bits to be equal
- ``draws``: random numbers by address
- ``initialization``: first values of parameters by address
"""
