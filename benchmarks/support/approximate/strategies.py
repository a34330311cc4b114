"""The ways of giving a lost stage a state that are compared with each other."""

from __future__ import annotations

from support.approximate.staged_model import Strategy

from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import OptimizerState

RANDOM = Strategy(name="random", how="random")
COPY = Strategy(name="copy of the stage before", weighting=Weighting.COPY)
UNIFORM = Strategy(name="uniform average", weighting=Weighting.UNIFORM)
BY_NORMS = Strategy(name="average by squared gradient norms")
STRATEGIES = (
    RANDOM,
    COPY,
    UNIFORM,
    BY_NORMS,
    Strategy(name="average as in the authors' code", how="authors"),
    Strategy(name="stale copy of 50 steps", how="stale", age=50, boost=1.0),
    Strategy(name="stale copy of 100 steps", how="stale", age=100, boost=1.0),
    Strategy(name="by norms, moments averaged", optimizer_state=OptimizerState.AVERAGE),
    Strategy(name="by norms, boost 1.0", boost=1.0),
    Strategy(name="by norms, boost 1.2", boost=1.2),
)
"""Those of figure 2, the weights of its authors' code, and what the product could do instead."""
CHECKFREE = Strategy(name="CheckFree", copies_ends=True)
CHECKFREE_PLUS = Strategy(name="CheckFree+")
OF_STATES = STRATEGIES[:7]
"""Those that give a stage different states; the others differ in how it is trained from there."""
RANDOM_END = Strategy(name="random, embedding and head kept", how="random", copies_ends=True)
COPIED_END = Strategy(name="copy of the stage beside, embedding and head kept", copies_ends=True)
OF_ENDS = (RANDOM_END, COPIED_END, *OF_STATES[5:])
