"""Finds the TrainingJobs of a cluster, and the way to their api.

- ``kube``: the API server that the user's kubeconfig names
- ``jobs``: TrainingJobs of a cluster, as jobs to ask about
"""
