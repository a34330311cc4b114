"""Takes facts into the state of a job, before anything is decided on them.

- ``facts``: takes in what trainers and pods tell, fact by fact
- ``reports``: takes in what pods, supervisors and the store report
- ``ends``: notes that a trainer or a pod has ended
- ``check_plans``: how the checks of each stage are planned
- ``missed_flips``: which injected flips changed nothing
- ``checkpoints``: what is known of durable checkpoints
- ``crashes``: when the same exception has come back too often
- ``silence``: when a pod that is not heard gave its last sign of life
- ``backoff``: how long trainers that end again and again are kept out
- ``pruning``: drops what need not be known any longer
- ``store_recovery``: what is believed when the store lost the job or fell back
"""
