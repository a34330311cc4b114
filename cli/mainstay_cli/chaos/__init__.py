"""Breaks a job in ways drawn from a seed, and compares the bits.

- ``campaign``: plans the runs of a campaign and carries them out
- ``runs``: one run of a campaign, as a process with a bound on its time
- ``verdicts``: what a campaign says of each fault
- ``flips``: wrong bits in steps that one process computes, and a table of what came of them
"""
