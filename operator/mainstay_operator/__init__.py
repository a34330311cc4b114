"""The operator: turns a TrainingJob into objects, pods into facts, facts into status.

It is the only writer of Kubernetes objects and makes no recovery decision.
Training goes on while it is away.
"""
