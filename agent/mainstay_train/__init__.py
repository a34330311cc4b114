"""What runs in the trainer's image: blocks, exact reduction, optimizer, launcher.

Everything here is public: our own trainer uses nothing else than a user can.
Importing this package does not import torch; its modules do.

The bits of a training run are a function of the job alone (design.md section 1),
never of the number of replicas or stages. Where that is decided:

- ``environment``, ``numerics``, ``fingerprint``: equal arithmetic, or a refusal
- ``draws``, ``initialization``, ``data``: random numbers and samples by address
- ``blocks``, ``split``: forward and backward over explicit tensors
- ``layout``: the flat buffers and the chunk grid on which reductions run
- ``optimizer``: gradient norm, clipping, apply
- ``digests``: how two states are compared
- ``workload``, ``models``: what the user brings, and a Llama built in
"""
