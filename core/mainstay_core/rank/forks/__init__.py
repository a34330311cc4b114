"""Decides what is made anew where nobody holds a position, and what follows from it for ever.

A fork is the ladder's row 5 (design section 5). A plan orders it, the settle carries it out at the
newest version that all other positions reach, and every state has it in its history from then on
(protocol section 6). What a fork makes depends on the version, the order and the last commit alone,
so it is repeated with the same bits when something fails on the way.

- ``rules``: the settings of a job's forks, and those that an order names instead
- ``histories``: what a history of forks comes to
- ``guard_copies``: which copies of guards count
- ``orders``: which positions an order makes anew, and when an exact state is loaded instead
- ``sources``: whether what an ordered fork would be made of is still there
- ``fork_plan``: the fork that a settle carries out, and the history that all states have with it
- ``makers``: what each maker of a lost position copies, and from whom
- ``courses``: whose states are of the course on which a quorum goes on
- ``repeats``: when a fork of another run is made again, and whose state is from before it
"""
