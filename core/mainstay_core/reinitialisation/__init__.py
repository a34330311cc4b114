"""Plans how a stage whose every copy is gone is made anew from what other stages hold.

- ``likeness``: which blocks are like which, and which one stands for a lost one
- ``weights``: how much of each of two stages goes into an average
- ``guards``: which cells keep what an end of the pipeline alone has
- ``sources``: the best sources of every lost block, or why there are none
- ``prospects``: from what each stage could be made anew, before anything is lost

From Blagoev et al., "All is Not Lost: LLM Recovery without Checkpoints" (CheckFree), section 4. The
result is a function of the cut, the kinds of blocks, the norms of one committed step and what is
left, so whoever makes a state anew makes the same bits. It needs the standard library alone:
trainers import it.
"""
