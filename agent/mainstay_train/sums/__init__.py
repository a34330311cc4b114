"""Adds up what lies in memory: digests, norms and imprints, of the same bits on every device.

- ``readout``: fetches small results from a device with one wait
- ``rows``: the chunks of a flat buffer, read in batches
- ``run_assembly``: loops over runs of memory, in LLVM's language
- ``assembly``: loops over chunks, in LLVM's language
- ``compiled``: the same as code of this processor
- ``products``: sums of a digest in operations of torch and numpy
- ``gpu``: the same in one pass on a GPU
- ``digests``: digests of tensors
- ``norms``: squared norms of gradients
- ``runs``: sums of short runs of memory, for imprints
"""
