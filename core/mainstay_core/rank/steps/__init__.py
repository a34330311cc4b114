"""Says who computes what in a step, and what becomes of types on which chains disagree.

- ``step_plan``: who computes what in a step, and whose partials are summed
- ``doubts``: what becomes of a type on which chains disagree, when somebody is lost
- ``witness``: which type a second chain computes in a step, and what its vote means
"""
