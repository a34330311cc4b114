"""Computes everything that the bits depend on, in an order that belongs to the model and the data.

- ``layout``: flat buffers and the fixed chunk grid
- ``slices``: the part of a tensor that an inner rank holds
- ``reduction``: the sum of gradients over the cells of a stage
- ``early``: the same, while the last type is still computed
- ``readout``: fetches small results from a device with one wait
- ``optimizer``: gradient norm, clipping, and the update of a stage
- ``digests``: digests of tensors
- ``numerics``: one arithmetic for all ranks of a job
- ``fingerprint``: what must be equal for bits to be equal
- ``draws``: random numbers by address
- ``initialization``: first values of parameters by address
"""
