"""Holds what a trainer's process needs before it can train: settings, sockets, threads, errors.

- ``environment``: environment variables that fix the arithmetic
- ``heap``: has the C library keep memory that was freed
- ``frames``: has Python keep the frames of calls in one piece of memory
- ``settings``: what a launcher tells a trainer
- ``job_secret``: the job's secret, as the pod was given it
- ``checkpoint_key``: the keys of checkpoints, as the pod was given them
- ``crashes``: tells a crash by its exception
- ``aborts``: exceptions that interrupt a quorum without being errors
- ``sockets``: the open sockets of this process, which any thread can shut
- ``network_cut``: an injected loss of the network
- ``device``: gives work to a device without waiting for it
- ``background``: a thread for what is done while training goes on
- ``output``: carries the output of trainers to their launcher
- ``decorator``: marks a function of the user as an own training loop
"""
