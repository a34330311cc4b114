"""Finds TrainingJobs of a cluster for the commands: ``kubectl mainstay``.

- ``kube``: the API server that the user's kubeconfig names
- ``jobs``: TrainingJobs of a cluster, as jobs to ask about
- ``plugin``: the command line of ``kubectl mainstay``
"""
