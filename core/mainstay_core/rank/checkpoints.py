"""Decides when a rank writes a checkpoint, and when a version is durable.

The decisions follow protocol section 10. They depend only on values that all ranks share: what the
last votes said, and what was settled. So all writers copy the same version at the same boundary.

- A version is due when ``version - newest durable >= everySteps``. The last version always is.
- An attempt begins only when nobody is writing. So it never overtakes an attempt that is still
  being written, and the writers never end up at different versions.
- A part outlives its quorum. Attempts that all positions have safely written are renamed by
  the first member of that time.
- A settle forgets what was tried. A dead writer's attempt is tried again at once.
"""

from __future__ import annotations

from mainstay_core.base.values import replace
from mainstay_core.rank.events import Action, RenameCheckpoint, SendFact, WriteCheckpoint
from mainstay_core.rank.saving.saves import Attempt, Saves, writer_of
from mainstay_core.rank.state import RankState, fact_of
from mainstay_core.wire.facts import Checkpoint


def is_unjudged_end(state: RankState) -> bool:
    """Return whether the last step's states are still to be compared: no vote follows."""
    return state.compares_last and state.version >= state.num_steps


def settled(state: RankState, durable: int) -> RankState:
    """Return the state in a quorum that has just settled.

    Args:
        state: of the rank.
        durable: newest durable version in the settle reports.
    """
    return replace(
        state,
        durable=durable,
        safe=0,
        safe_nonce="",
        tried=0,
        writers_free=False,
        told_busy=False,
        save_round=0,
    )


def note_saves(state: RankState, saves: Saves) -> tuple[RankState, tuple[Action, ...]]:
    """Return the state after everybody's status, and the rename of a version of safe parts."""
    durable, free = max(state.durable, saves.durable), not saves.busy
    if (state.durable, state.writers_free) != (durable, free):
        state = replace(state, durable=durable, writers_free=free)
    known = Attempt(version=state.safe, nonce=state.safe_nonce)
    if saves.safe is None or saves.safe.version <= durable or saves.safe.order <= known.order:
        return state, ()
    # It is durable only once a status says so: the first member may die before it renames, and a
    # rank that comes back may tell of an attempt whose parts are gone.
    safe, nonce = saves.safe.version, saves.safe.nonce
    state = replace(state, safe=safe, safe_nonce=nonce, writers_free=False)
    rename = RenameCheckpoint(safe, nonce, state.all_clean_at)
    return state, (rename,) if state.index == 0 else ()


def begin_due(state: RankState) -> tuple[RankState, tuple[Action, ...]]:
    """Return the state at a step's boundary, and the action that writes a version that is due."""
    every, last = state.checkpoint_every_steps, state.version >= state.num_steps
    since = state.version - max(state.durable, state.tried, state.safe)
    if not every or (since < every and not (last and since > 0)):
        return state, ()
    if state.writers_free:
        return _begin(state)
    if state.told_busy or last:
        return state, ()
    why = f"the checkpoint due at step {state.version} waits: an earlier one is still being written"
    told = replace(state, told_busy=True)
    return told, _tell_problem(state, why)


def is_open(state: RankState) -> bool:
    """Return whether this version must still become durable before the job ends or is suspended."""
    return state.checkpoint_every_steps > 0 and state.durable < state.version


def end_round(state: RankState, saves: Saves) -> tuple[RankState, tuple[Action, ...], bool]:
    """Return the state, the actions, and whether the saving is over, after everybody's status.

    No further step follows, and nobody writes when these statuses are exchanged. Rounds go on until
    the version is durable, or was tried in this quorum in vain: a full disk must not keep a job
    from ending.
    """
    before = state.safe, state.safe_nonce
    state, actions = note_saves(replace(state, save_round=state.save_round + 1), saves)
    if not is_open(state):
        return state, actions, True
    if (state.safe, state.safe_nonce) != before:
        return state, actions, False
    if state.tried < state.version:
        state, write = _begin(state)
        return state, (*actions, *write), False
    last = "the last step" if state.version >= state.num_steps else "this step"
    why = f"the checkpoint of {last}, {state.version}, did not become durable"
    return state, (*actions, *_tell_problem(state, why)), True


def _tell_problem(state: RankState, why: str) -> tuple[Action, ...]:
    """Return the first member's fact about a checkpoint that is late or failed."""
    if state.index != 0:
        return ()
    return (
        SendFact(fact_of(state, Checkpoint, complete=False, durable=state.durable, evidence=why)),
    )


def _begin(state: RankState) -> tuple[RankState, tuple[Action, ...]]:
    assert state.plan is not None
    assert state.commit is not None
    tried = replace(state, tried=state.version, told_busy=False)
    if writer_of(state.plan, state.index) != state.index:
        return tried, ()
    write = WriteCheckpoint(
        state.version, state.commit, state.commit_chain, state.history, state.all_clean_at
    )
    return tried, (write,)
