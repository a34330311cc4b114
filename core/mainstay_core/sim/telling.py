"""What a simulated trainer says: votes, ledger entries, final digests."""

from __future__ import annotations

from dataclasses import asdict

from mainstay_core.rank.events import CastVote
from mainstay_core.rank.state import RankState
from mainstay_core.sim import terms
from mainstay_core.sim.compute import Compute
from mainstay_core.wire.ledger import FinalDigests, LedgerEntry
from mainstay_core.wire.plan import Plan
from mainstay_core.wire.votes import Commit, LastStatus, SaveStatus, Vote


def vote(
    state: RankState,
    compute: Compute,
    action: CastVote,
    newest: Plan,
    saves: SaveStatus,
) -> Vote:
    """Return a rank's vote.

    Args:
        state: the rank.
        compute: what it has computed.
        action: which vote.
        newest: newest plan seen.
        saves: what it says of checkpoints.
    """
    assert state.step_plan is not None
    assert state.plan is not None
    table = state.step_plan.table[compute.position]
    return Vote(
        step=action.step,
        attempt=action.attempt,
        ok=True,
        norms_sq=(2.0 + compute.stage, 1.0 + compute.inner),
        gradient=terms.term("gradient", compute.reduced),
        state=state.digest,
        stats=compute.stats(table, state.index, action.step),
        newest_plan=newest.quorum.id,
        newest_nonce=newest.quorum.nonce,
        **asdict(saves),
        copies=terms.term("copies", compute.stage, action.step),
    )


def last_status(saves: SaveStatus, state: str) -> LastStatus:
    """Return what a rank says of checkpoints, and of its state, where no step follows."""
    return LastStatus(**asdict(saves), state=state)


def ledger_entry(
    state: RankState, commit: Commit, gradient: str, masters: str, now_s: float
) -> LedgerEntry:
    """Return the entry of a step that a rank has applied.

    Args:
        state: as it was while the step was applied.
        commit: the step's certificate.
        gradient: digest of the reduced gradient.
        masters: digest of the state after the step.
        now_s: wall clock of the pod.
    """
    assert state.plan is not None
    return LedgerEntry(
        step=commit.step,
        stage=state.member_stage,
        inner=state.member_inner,
        quorum=state.plan.quorum,
        gradient=gradient,
        masters=masters,
        data=commit.data,
        loss=commit.loss,
        norm=commit.norm,
        tokens=commit.tokens,
        step_s=0.5,
        replicas=len(state.plan.chains),
        attempt=state.attempt,
        committed_at_s=now_s,
    )


def final_digests(state: RankState, compute: Compute) -> FinalDigests:
    """Return the digests of a position at the end of the job."""
    return FinalDigests(
        stage=compute.stage,
        inner=compute.inner,
        version=state.version,
        params=compute.params,
        masters=state.digest,
        optimizer=compute.params,
        data=state.commit.data_total if state.commit else "",
    )
