"""Decides how the members of a quorum meet: who is let in, what is gathered, and how that ends.

- ``frames``: what a member and its gather server say to each other, as values and as bytes
- ``server``: the rooms in which members meet
- ``client``: one member's side

The supervisor and the trainer drive both machines over sockets, the simulation over a
network that it plays.

A gather is the one collective that may not be a collective library's: it is on the path
of every step and must be interruptible at once. A TCP star through one supervisor takes
0.15 ms where a gloo all_gather takes 12 ms (protocol section 12). Neither machine has a
timeout, as late is not gone (protocol section 5). Neither connects again: a member whose
connection has ended leaves the quorum.
"""
