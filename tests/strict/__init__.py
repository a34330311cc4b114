"""A backend of process groups that is as strict as NCCL, on a CPU.

- A send begins when its receive has: nobody keeps what is not received yet. It is over when its
  bytes are in the socket.
- Tags are ignored. A rank's operations run one after the other, in the order of their start.
- Operations that are aborted end without an error, with garbage in their outputs.
- Connecting waits until all ranks are there, or the group is aborted.
- A peer that is lost is told to whoever asks, and ends nothing.

``transport`` moves the bytes, ``group`` is torch's process group over it, ``workload`` the entry
point of jobs whose trainers use it.
"""
