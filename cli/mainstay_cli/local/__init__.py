"""Runs a job on this machine: its pods, Redis and api are processes.

- ``run``: one run, from the checks to the report
- ``preflight``: checks the machine before anything starts
- ``manifests``: reads a job's YAML and a faults file
- ``processes``: starts processes that all end with the run
- ``services``: Redis and the api: how each is started and asked whether it serves
- ``keeper``: starts a service, and again when it ends
- ``restarts``: decides whether and when a service is started again
- ``redis_server``: the command of a real redis-server on a Unix socket, and talk with it
- ``shortage``: names what this machine has run out of
- ``watch``: says during a run when this machine runs short
- ``forge``: asks the forge to fork launchers
- ``pods``: makes pods as processes and sees them end
- ``pool``: keeps as many pods as the job needs, by the operator's decision
- ``faults``: carries out injected faults on Redis and the api
- ``runs``: finds the runs that a command can ask about
- ``sizes``: computes what the ranks of a job would hold and send
- ``torch_process``: asks a process with torch one question
- ``profiling``: has the operators of a stage recorded
- ``checkpoint_files``: finds durable checkpoints and the jobs that may go on from them
- ``repeated``: reads the lineage of another run, for a run that makes the same forks
"""
