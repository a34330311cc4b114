"""Describes a TrainingJob, its spec, status and CRD, and derives what follows from the spec alone.

- ``spec``: the whole TrainingJob, for the YAML of local mode, the api and the CRD
- ``sections``: one model for each section of the spec
- ``detection_sections``: those of how faults and wrong results are found
- ``guards``: how many cells guard what an end of the pipeline alone has
- ``types``: the types of single fields, with their bounds
- ``refusals``: messages that name a wrong field and what would be right
- ``status``: the status that the operator writes
- ``crd``: the CustomResourceDefinition, made from the model
- ``crd_rules``: rules that the API server checks, in CEL
- ``sentences``: what the model and these rules say alike of pipelines and permission
- ``config``: what trainers and supervisors need to know of a job, in plain values
- ``approximation``: what it says of approximate recovery, checked, and the rules that follow
- ``phase``: the phases of a job, and which of them are its end
- ``stages``: the cut of a model into pipeline stages
- ``object_names``: the names of what a job has in a cluster beside its pods
- ``pod_templates``: what a cluster asks of a job's pod template
- ``recompute``: which blocks of a stage run their forward again in the backward
- ``model_sizes``: the sizes of the built-in models, computed without torch
- ``sizes/``: computes what ranks and pods hold in memory and send
- ``shared_memory``: the size of a pod's memory-backed volume
- ``protections``: which protections a job has, and why not the others
"""
