"""Plans who computes what: planners that take values and return plans.

- ``placement``: which lanes host which shard type
- ``chaining``: which living cells form whole replicas
- ``assignment``: who computes each shard type after replicas were lost or came back
- ``partials``: how a cell groups the gradients of the types that it computed
- ``shares``: the work of each replica when a job begins
- ``routes``: in which order a micro-batch visits the stages
- ``played``: an order of work for each rank, found by playing the pipeline
- ``program``: the typed actions of one rank in one step
- ``receipts``: what tells a rank in a step that its neighbours have what it sent
"""
