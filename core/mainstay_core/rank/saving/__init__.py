"""Says what a rank has written of durable checkpoints, and what makes room for the next.

- ``saves``: what votes say of durable checkpoints
- ``own_saves``: what one rank has written of checkpoints, as its votes say it
- ``disk_room``: what is removed from the disk so that a checkpoint has room
"""
