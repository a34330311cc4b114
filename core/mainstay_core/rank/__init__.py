"""Decides what one trainer does: when it computes, votes, applies, settles with others, and saves.

- ``events``: what happens to a rank, and what its shell is told to do
- ``state``: what a rank holds, and what a newer plan means for it
- ``step_plan``: who computes what in a step, and whose partials are summed
- ``witness``: which type a second chain computes in a step, and what its vote means
- ``settle``: where the survivors of a failure go on, from their reports
- ``early``: whether a reduction begins while the last type is computed
- ``votes``: what all votes of a step say together
- ``saves``: what votes say of durable checkpoints
- ``checkpoints``: when a rank writes a checkpoint, and when a version is durable
- ``adoption``: when a rank leaves its quorum: for the newest plan, or parked until there is one
- ``recheck``: what a rank computes again when its results are doubted
- ``machine``: the rank's state machine
- ``own_saves``: what one rank has written of checkpoints, as its votes say it
- ``disk_room``: what is removed from the disk so that a checkpoint has room
- ``reports``: what a rank tells: its status, votes and ledger entries
- ``serving``: when a rank's state may be copied, and when a copy is good
- ``copying``: which source a joiner asks for which chunk of a state
- ``connections``: what a rank is connected to for its plan, and how that ends
- ``windows``: when which part of a state is copied into memory, and when a snapshot is complete
- ``authors``: which units a member copies, and which pods hold the copies
- ``replaying``: which states can be made anew from what pods keep in memory, and how
- ``boundaries``: how the members of lost stages compute their steps again from boundary logs
- ``boundary_stores``: which states of lost stages can be computed again from boundary logs
- ``keeping``: what a session asks of the writers of checkpoints and segments
- ``shell``: what a session asks of its shell
- ``session``: the order in which a trainer carries out what its machine decides
"""
