"""Names the places at which a fault may strike, by what is decided or done there."""

from __future__ import annotations

POINTS = (
    "Settle",
    "settle-posted",
    "settle-gathered",
    "LoadState",
    "HEAL",
    "healed",
    "SendFact",
    "Compute",
    "FORWARD",
    "BACKWARD_INPUT",
    "SEND_F",
    "RECV_F",
    "SEND_B",
    "RECV_B",
    "REDUCE",
    "reduce-half",
    "reduced",
    "VOTE",
    "vote-posted",
    "votes-gathered",
    "APPLY",
    "applied",
    "DropHeld",
    "Leave",
    "CHECKPOINT",
    "RenameCheckpoint",
    "WaitForPlan",
    "Finish",
)
"""Places in a trainer's code at which a fault may strike: between any two actions."""
COMMIT_POINTS = (
    "settle-posted",
    "settle-gathered",
    "healed",
    "reduced",
    "vote-posted",
    "votes-gathered",
    "APPLY",
    "applied",
)
"""Where it is decided what is committed and who has it."""
PAUSE_POINTS = (
    "Settle",
    "settle-gathered",
    "LoadState",
    "SendFact",
    "ShareSaves",
    "saves-posted",
    "WriteCheckpoint",
    "RenameCheckpoint",
    "WaitForPlan",
)
"""Where a job is while it comes to stand still, and when it goes on."""
WRITE_POINTS = (
    "SNAPSHOT",
    "LOG",
    "logged",
    "vote-posted",
    "votes-gathered",
    "KeepRecord",
    "KeepFrom",
    "APPLY",
    "applied",
    "FORWARD",
)
"""Where segments are written, counted and dropped, and what is between."""
COPY_POINTS = ("SNAPSHOT_COPIED", "SNAPSHOT_HELD")
"""Where all that a trainer copies at one version is in its own store, and where all holders have
it."""
READ_POINTS = (
    "settle-posted",
    "stores-posted",
    "settle-gathered",
    "REPLAY",
    "replay-half",
    "replayed",
)
"""Where it is found out what stores hold, and where they are read."""
REPLAY_POINTS = (
    "REPLAY",
    "unit-loaded",
    "READ_F",
    "READ_B",
    "flow-read",
    "WRITE_F",
    "WRITE_B",
    "flow-written",
    "step-replayed",
    "replayed",
    "logged-again",
    "REPLAYED",
)
"""Before and after each action of a stage that computes its steps again from boundary logs."""
FORK_POINTS = (
    "Settle",
    "settle-posted",
    "settle-gathered",
    "LoadState",
    "HEAL",
    "copied-beside",
    "made-anew",
    "SendFact",
    "Compute",
    "vote-posted",
    "votes-gathered",
    "applied",
)
"""From the plan of a fork to the first commit after it."""
API_POINTS = ("api-decided", "api-committed")
"""Before and after the compare-and-set of a plan."""
RULED_BETWEEN = ("vote-posted", "votes-gathered", "Compute", "FORWARD", "REDUCE", "settle-posted")
"""Where something is lost before chains that have computed a type differently are ruled on."""
