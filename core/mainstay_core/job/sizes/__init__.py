"""Computes what the ranks and pods of a job hold in memory, and what they send in a step.

- ``block_sizes``: what one block takes on a rank, computed or measured
- ``reduction_sizes``: the memory in which a rank reduces gradients
- ``llama_tensors``: the shape of the built-in Llama, and the tensors of a layer
- ``llama_passes``: the memory of each pass through a block of the built-in Llama
- ``moe_passes``: the memory of each pass through a layer with experts
- ``llama_sizes``: what the built-in Llama's blocks take
- ``moe_sizes``: what the blocks of the built-in mixture of experts take
- ``built_in_sizes``: the formulas of a built-in model, by its entrypoint
- ``rank_sizes``: what each rank holds, and what it sends in a step
- ``size_summary``: what ranks hold and send in sentences, as far as the specification tells
- ``snapshot_sizes``: the memory of pods for snapshots of the state, and how these are kept
- ``snapshot_logs``: from what a lost state is made anew: gradients, or what crosses boundaries
- ``snapshot_traffic``: what pods send each other of snapshots and logs
"""
