"""The decisions of Mainstay: pure functions and state machines on values.

Nothing here opens a socket, starts a thread or reads a clock. Time and
randomness are arguments, results are plans with a reason, and the processes
(api, agent, trainer, cli) are shells that carry them out.
"""
