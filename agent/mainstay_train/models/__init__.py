"""Builds the models that come with Mainstay.

Their paths are public: a TrainingJob names them, as ``mainstay_train.models.llama:workload``.

- ``llama``: a Llama of any size, as blocks
- ``llama_config``: its configuration
- ``attention``: attention, by a fused kernel or explicit, and addressed dropout
- ``llama_parallel``: the same Llama, spread over the ranks of a cell
- ``moe``: a mixture of experts with the Llama's attention, as blocks
- ``moe_config``: its configuration
- ``experts``: the router, and the way of tokens to their experts and back
"""
