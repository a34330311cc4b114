"""Decides what one trainer does: when it computes, votes, applies, settles with others, and saves.

- ``events``: what happens to a rank, and what its shell is told to do
- ``state``: what a rank holds, and what a newer plan means for it
- ``steps/``: who computes what in a step, and what becomes of types on which chains disagree
- ``forks/``: what is made anew where nobody holds a position, and what follows from it for ever
- ``refusals``: what a rank tells whose state does not count, as others have gone on without it
- ``settled_windows``: what reports tell of windows of snapshots
- ``reach``: which versions members can come to
- ``settle``: where the survivors of a failure go on, from their reports
- ``early``: whether a reduction begins while the last type is computed
- ``votes``: what all votes of a step say together
- ``saving/``: what was written of durable checkpoints, and what makes room for the next
- ``checkpoints``: when a rank writes a checkpoint, and when a version is durable
- ``adoption``: when a rank leaves its quorum: for the newest plan, or parked until there is one
- ``recheck``: what a rank computes again when its results are doubted
- ``making``: what a rank does to make a stage anew
- ``machine``: the rank's state machine
- ``reports``: what a rank tells: its status, votes and ledger entries
- ``serving``: when a rank's state may be copied, and when a copy is good
- ``copying``: which source a joiner asks for which chunk of a state
- ``connections``: what a rank is connected to for its plan, and how that ends
- ``windows``: when which part of a state is copied into memory, and when a snapshot is complete
- ``replays/``: which lost states can be made anew from what pods keep, and how
- ``keeping``: what a session asks of the writers of checkpoints and segments
- ``shell``: what a session asks of its shell
- ``guarding``: how guards get what they need in each step
- ``session``: the order in which a trainer carries out what its machine decides
"""
