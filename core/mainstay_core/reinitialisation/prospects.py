"""Says of every stage from what it could be made anew, before anything is lost."""

from __future__ import annotations

from collections.abc import Sequence

from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    Position,
    plan_reinitialisation,
    with_stale,
)
from mainstay_core.reinitialisation.weights import Weighting
from mainstay_core.wire.reinitialisation import Prospect, Reinitialisation, Rule, StageOutline

_HOW = {
    Weighting.GRADIENT_NORM: "weighed by their squared gradient norms in the last step",
    Weighting.UNIFORM: "one half each",
    Weighting.COPY: "blocks of one or the other",
}


def list_prospects(
    stages: Sequence[StageOutline],
    *,
    policy: Policy,
    left: Left | None = None,
    ranks_per_stage: int = 1,
    version: int = 0,
    durable: int = 0,
) -> tuple[Prospect, ...]:
    """Return for each stage from what it could be made anew, were it lost alone, or why not.

    Complexity: that of planning each stage once.

    Args:
        stages: the cut: the blocks of every stage.
        policy: how lost blocks may be made anew.
        left: the copies that would be left; None: there are none.
        ranks_per_stage: inner ranks of each stage; all of them are lost.
        version: at which all would go on.
        durable: newest durable version; 0: there is none.
    """
    is_allowed = bool(durable and policy.stale_steps)
    has_stale = is_allowed and version - durable <= policy.stale_steps
    return tuple(
        _prospect(
            stage,
            plan_reinitialisation(
                stages,
                [(stage, inner) for inner in range(ranks_per_stage)],
                version=version,
                # The weights depend on norms that only trainers know. The sources do not.
                norms_sq={},
                left=with_stale(left or Left(), stages, _places(stage, ranks_per_stage), durable)
                if has_stale
                else left or Left(),
                policy=policy,
                ranks_per_stage=ranks_per_stage,
            ),
            policy.weighting,
            [block.rule for block in stages[stage]],
        )
        for stage in range(len(stages))
    )


def _places(stage: int, ranks_per_stage: int) -> list[Position]:
    return [(stage, inner) for inner in range(ranks_per_stage)]


def _prospect(
    stage: int,
    answer: Reinitialisation | NoSource,
    weighting: Weighting,
    rules: Sequence[Rule | None],
) -> Prospect:
    if isinstance(answer, NoSource):
        return Prospect(stage=stage, possible=False, reason=answer.reason)
    blocks = [block for place in answer.positions for block in place.blocks]
    stale = [s.version for block in blocks for s in block.sources if s.version is not None]
    guarded = [block.block for block in blocks if block.is_exact]
    others = sorted({s.stage for b in blocks if not b.is_exact for s in b.sources})
    by_norms = weighting is Weighting.GRADIENT_NORM
    if stale:
        reason = f"its own checkpoint of step {stale[0]}"
    elif by_norms and others and set(rules) == {Rule.COPY}:
        reason = f"a copy of stage {stage - 1} or {stage + 1}, by which has the larger gradient"
    elif not others:
        reason = "nothing, as it has no block"
    elif len(others) == 1:
        reason = f"a copy of stage {others[0]}"
    else:
        reason = f"stages {' and '.join(map(str, others))}, {_HOW[weighting]}"
    if guarded:
        (guards,) = {s.stage for b in blocks if b.is_exact for s in b.sources}
        exact = f"{' and '.join(guarded)} exactly as guards in stage {guards} have it"
        reason = f"{reason}, and {exact}" if others else exact
    return Prospect(stage=stage, possible=True, reason=reason)
