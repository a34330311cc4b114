"""Runs a job on this machine: its pods, Redis and api are processes.

- ``run``: one run, from the checks to the report
- ``preflight``: checks the machine before anything starts
- ``manifests``: reads a job's YAML and a faults file
- ``processes``: starts processes that all end with the run
- ``services``: starts Redis and the api, and starts them again when they end
- ``redis_server``: starts a real redis-server on a Unix socket
- ``forge``: asks the forge to fork launchers
- ``pods``: makes pods as processes and sees them end
- ``pool``: keeps as many pods as the job needs, by the operator's decision
- ``faults``: carries out injected faults on Redis and the api
- ``runs``: finds the runs that a command can ask about
- ``checkpoint_files``: finds durable checkpoints and the jobs that may go on from them
"""
