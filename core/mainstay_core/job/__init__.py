"""Describes a TrainingJob, its spec, status and CRD, and derives what follows from the spec alone.

- ``spec``: the whole TrainingJob, for the YAML of local mode, the api and the CRD
- ``sections``: one model for each section of the spec
- ``types``: the types of single fields, with their bounds
- ``refusals``: messages that name a wrong field and what would be right
- ``status``: the status that the operator writes
- ``crd``: the CustomResourceDefinition, made from the model
- ``crd_rules``: rules that the API server checks, in CEL
- ``config``: what trainers and supervisors need to know of a job, in plain values
- ``phase``: the phases of a job, and which of them are its end
- ``stages``: the cut of a model into pipeline stages
- ``object_names``: the names of what a job has in a cluster beside its pods
- ``pod_templates``: what a cluster asks of a job's pod template
- ``model_sizes``: the sizes of the built-in models, computed without torch
- ``block_sizes``: what one block takes on a rank, computed or measured
- ``llama_tensors``: the shape of the built-in Llama, and the tensors of a layer
- ``llama_passes``: the memory of each pass through a block of the built-in Llama
- ``llama_sizes``: what the built-in Llama's blocks take
- ``moe_passes``: the memory of each pass through a layer with experts
- ``moe_sizes``: what the blocks of the built-in mixture of experts take
- ``built_in_sizes``: the formulas of a built-in model, by its entrypoint
- ``reduction_sizes``: the memory in which a rank reduces gradients
- ``rank_sizes``: what each rank holds, and what it sends in a step
- ``snapshot_logs``: from what a lost state is made anew: gradients, or what crosses boundaries
- ``snapshot_sizes``: the memory of pods for snapshots of the state, and how these are kept
- ``size_summary``: the same in sentences, as far as the specification tells
- ``shared_memory``: the size of a pod's memory-backed volume
- ``protections``: which protections a job has, and why not the others
"""
