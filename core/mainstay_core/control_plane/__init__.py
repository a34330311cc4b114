"""Serves jobs from a store that several replicas of the api share: decisions go in, answers out.

What is decided of a job is the coordinator's. Here it is said how a decision becomes the store's,
once, whoever else decides meanwhile, and what is told to whom about it.

- ``job_store``: what a store keeps of one job, and what its scripts do to that
- ``transactions``: stores decisions: load, decide, compare-and-set, and again
- ``answers``: what a replica of the api answers supervisors
- ``problems``: how a refusal, or trouble with the store, is answered
- ``stream``: what a listener to the job's stream gets, and in which order
- ``heartbeats``: how long pods have been silent
- ``watch``: which jobs a replica of the api looks at for silence, and when
"""
