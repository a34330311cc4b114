"""Chooses the recovery method after a fault: the recovery ladder (design section 5).

One pure function maps what is known to a row of the ladder. It returns a sentence for the row that
it chooses and one for each row that it passes over. The input says, for each stage, which exact
copies of its state are left. A row that applies but cannot be executed yet yields row 6 with that
reason, never a worse row in silence.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from mainstay_core.base.words import count
from mainstay_core.job.config import MAX_FORKS
from mainstay_core.reinitialisation.sources import (
    Left,
    NoSource,
    Policy,
    plan_reinitialisation,
    with_stale,
)
from mainstay_core.wire.reinitialisation import Reinitialisation, SourceKind, StageOutline


class Row(enum.IntEnum):
    """The rows of the ladder, best first."""

    HAND_OVER = 0
    RECHECK = 1
    MASK = 2
    REPLAY = 3
    RESTART = 4
    APPROXIMATE = 5
    WAIT = 6


EXECUTABLE = frozenset(Row) - {Row.RECHECK}
"""Rows that the runtime carries out. The other rows are decided, and the job waits."""

FULL_HISTORY = f"{MAX_FORKS} stages were made anew before, the most that a history can hold"
"""Why row 5 applies no more to a job whose states contain that many forks."""
SEED_STEPS = 100
"""Steps that a job which may go on approximately gives up for an exact beginning, where it names no
bound: before it has a checkpoint, the seed's initial state is its only exact source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHolders:
    """The exact copies that are left of one stage's state, or of one of its inner ranks' state."""

    stage: int
    inner: int | None = None
    """None where a stage has one rank."""
    holders: int
    """Living cells that hold the state."""
    living: int
    """Living cells assigned to the stage, with or without its state."""
    replayable: bool = False
    """Whether pods are left that may keep its snapshots and logs in memory. Whether these are
    complete is what the trainers find out when they settle."""
    unreached: bool = False
    """Whether they have found that these are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of the ladder: all faults that are not yet recovered, taken together."""

    stages: tuple[StageHolders, ...]
    step: int
    """Number of committed steps."""
    free_slots: int = 0
    """Trainers that are up and could take a place now."""
    leaving: int = 0
    """Cells that still work but announced that they will leave, or lag behind."""
    lost: int = 0
    """Cells that are gone."""
    disagreement: str = ""
    """What a check found, if copies disagree."""
    durable_step: int | None = 0
    """Newest durable version. 0 is the seed's initial state; None: even that is gone."""
    allow_approximate: bool = False
    approximate_after_lost_steps: int | None = None
    """An exact restart that loses more steps than this is not worth it, if there is another way.
    None: one from a checkpoint always is, one from the seed in the first ``SEED_STEPS`` steps."""
    outline: tuple[StageOutline, ...] = ()
    """The blocks of every stage; empty if no trainer has told them."""
    reinitialisation: Policy = field(default_factory=Policy)
    """How lost blocks may be made anew from others."""
    left: Left = field(default_factory=Left)
    """The copies that are left of some of them."""
    num_forks: int = 0
    """Forks that the job's states contain."""
    executable: frozenset[Row] = EXECUTABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """The lack that a job waits for: equal lacks are one and the same wait, however it is said."""

    row: Row
    """The row that would apply but cannot be carried out; WAIT if there is none."""
    stages: tuple[tuple[int, int | None], ...]
    """(stage, inner rank) that have no living cell, if trainers are too few; else those that have
    no exact source."""
    free_slots: int = 0
    """Trainers that are up and could take a place, if they are too few."""
    outline: bool = False
    """Whether a member is still to tell of what blocks the stages consist."""
    silent: bool = False
    """Whether a holder that was only cut off is waited for, alone or beside that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The row that the ladder chooses, and why."""

    row: Row
    exact: bool
    reason: str
    """One sentence, as status, events and logs show it."""
    why_not: tuple[str, ...]
    """One sentence for each row passed over, in order."""
    from_step: int | None = None
    """Step from which an exact restart goes on. The trainers' settle decides in the end."""
    lack: Lack
    """What the job lacks, should it have to wait though it has this answer."""


def decide(situation: Situation) -> Decision:
    """Return the first row that applies.

    Complexity: linear in the number of stages.
    """
    passed: list[str] = []
    for row, test in _TESTS.items():
        applies, sentence = test(situation)
        if not applies:
            passed.append(f"row {row.value} ({row.name.lower()}): {sentence}")
            continue
        if row not in situation.executable:
            passed.append(f"row {row.value} ({row.name.lower()}): cannot be executed yet")
            reason = f"{sentence}; the answer ({row.name.lower()}) cannot be executed yet"
            return _decision(Row.WAIT, reason, passed, lack_of(situation, row))
        source = situation.durable_step if row is Row.RESTART else None
        return _decision(row, sentence, passed, lack_of(situation, row), source)
    if _is_too_old(situation) and _places(situation) <= situation.free_slots:
        # Permission for an approximate recovery must not leave a job worse off than without it.
        sentence, lack = _go_back(situation), lack_of(situation, Row.RESTART)
        reason = f"{sentence}, for want of anything newer"
        return _decision(Row.RESTART, reason, passed, lack, situation.durable_step)
    return _decision(Row.WAIT, _condition(situation), passed, lack_of(situation, Row.WAIT))


def _decision(
    row: Row, reason: str, passed: list[str], lack: Lack, source: int | None = None
) -> Decision:
    return Decision(
        row=row,
        exact=row is not Row.APPROXIMATE,
        reason=reason,
        why_not=tuple(passed),
        from_step=source,
        lack=lack,
    )


def lack_of(situation: Situation, row: Row) -> Lack:
    """Return what a job in this situation lacks.

    Args:
        situation: all faults that are not yet recovered.
        row: the row whose answer cannot be carried out; WAIT if none applies.
    """
    too_few = _places(situation) > situation.free_slots
    without = _empty(situation) if too_few else _without_state(situation)
    return Lack(
        row=row,
        stages=tuple((s.stage, s.inner) for s in without),
        free_slots=situation.free_slots if too_few else 0,
    )


def _without_state(situation: Situation) -> list[StageHolders]:
    return [s for s in situation.stages if s.holders == 0]


def _empty(situation: Situation) -> list[StageHolders]:
    return [s for s in situation.stages if s.living == 0]


def _places(situation: Situation) -> int:
    """Return the number of slots that are missing so that every stage has a cell."""
    return len(_empty(situation))


def _hand_over(situation: Situation) -> tuple[bool, str]:
    if situation.lost:
        return False, f"{count(situation.lost, 'cell')} already lost"
    if not situation.leaving:
        return False, "no cell has announced that it leaves"
    return True, f"{count(situation.leaving, 'cell')} will leave and still work"


def _recheck(situation: Situation) -> tuple[bool, str]:
    if not situation.disagreement:
        return False, "no check disagrees"
    return True, f"a check disagrees: {situation.disagreement}"


def _mask(situation: Situation) -> tuple[bool, str]:
    without = _without_state(situation)
    if without:
        return False, f"{_stages(without)} no living cell with a state"
    if situation.lost:
        return True, f"every stage still has a living cell; {count(situation.lost, 'cell')} lost"
    return False, "no cell is lost"


def _replay(situation: Situation) -> tuple[bool, str]:
    without = _without_state(situation)
    if not without:
        return False, "every stage has a living cell"
    missing = [s for s in without if not s.replayable]
    if missing:
        complete = "complete " if any(s.unreached for s in missing) else ""
        return False, f"{_stages(missing)} no {complete}snapshots and logs in memory"
    if _places(situation) > situation.free_slots:
        return False, _condition(situation)
    whose, what = ("its", "it") if len(without) == 1 else ("their", "them")
    source = situation.durable_step
    other = "" if source is None else f", or all go on from {_origin(source)}"
    if situation.allow_approximate:
        other = ", or, if these are not complete, go on as the next rows say"
    return True, (
        f"{_stages(without)} no living cell with a state; {whose} trainers make {what} anew from "
        f"snapshots in memory{other}"
    )


def _restart(situation: Situation) -> tuple[bool, str]:
    without = _without_state(situation)
    if not without:
        return False, "every stage has a living cell"
    source = situation.durable_step
    if source is None:
        return False, "no exact source is left"
    if _is_too_old(situation):
        limit = situation.approximate_after_lost_steps
        steps = count(SEED_STEPS if limit is None else limit, "step")
        return False, f"{_origin(source)} is more than {steps} old"
    if _places(situation) > situation.free_slots:
        return False, _condition(situation)
    return True, _go_back(situation)


def _go_back(situation: Situation) -> str:
    without, source = _without_state(situation), situation.durable_step
    assert source is not None
    return f"{_stages(without)} no living cell with a state; all go on from {_origin(source)}"


def _is_too_old(situation: Situation) -> bool:
    """Return whether a job goes on approximately rather than from the newest exact source."""
    source, limit = situation.durable_step, situation.approximate_after_lost_steps
    if source is None or not situation.allow_approximate or not _without_state(situation):
        return False
    if limit is None:
        return source == 0 and situation.step > SEED_STEPS
    return situation.step - source > limit


def _origin(source: int) -> str:
    return f"step {source}" if source else "the seed's initial state"


def judge_approximate(situation: Situation) -> tuple[bool, str]:
    """Return whether row 5 applies, and the sentence why, or why not."""
    without = _without_state(situation)
    if not without:
        return False, "every stage has a living cell"
    if not situation.allow_approximate:
        return False, "recovery.allowApproximate is off"
    if situation.num_forks >= MAX_FORKS:
        return False, FULL_HISTORY
    source = situation.durable_step
    if source is not None and not _is_too_old(situation):
        return False, f"an exact source (step {source}) is left"
    if len(without) == len(situation.stages):
        return False, "no stage has a living cell to initialise the others from"
    answer = _plan_sources(situation)
    why_not = answer.reason if isinstance(answer, NoSource) else _halved(answer)
    if isinstance(answer, NoSource) or why_not:
        return False, why_not
    if _places(situation) > situation.free_slots:
        return False, _condition(situation)
    made = "it is" if len(without) == 1 else "they are"
    worth = "no exact source" if source is None else f"no exact source newer than {_origin(source)}"
    return True, f"{_stages(without)} {worth}; {made} made anew from {_sources(answer)}"


def _sources(answer: Reinitialisation) -> str:
    """Return of what lost states are made anew, as far as that is known before a settle."""
    kinds = [s.kind for place in answer.positions for b in place.blocks for s in b.sources]
    versions = [
        s.version
        for place in answer.positions
        for b in place.blocks
        for s in b.sources
        if s.version is not None
    ]
    if not versions:
        return "other stages"
    whose = "its" if len(answer.positions) == 1 else "their"
    own = f"{whose} own checkpoint of step {max(versions)}"
    return own if len(versions) == len(kinds) else f"{own}, and from other stages"


def _plan_sources(situation: Situation) -> Reinitialisation | NoSource:
    """Return of what the lost states can be made anew, or why they cannot."""
    if len(situation.outline) != 1 + max(s.stage for s in situation.stages):
        return NoSource(reason="no trainer has told of what blocks the stages consist")
    lost = [(s.stage, s.inner or 0) for s in _without_state(situation)]
    policy, durable = situation.reinitialisation, situation.durable_step or 0
    # An older one would be worse than to go back: that is not what was asked for.
    has_stale = bool(durable) and situation.step - durable <= policy.stale_steps
    left = situation.left
    if has_stale:
        left = with_stale(left, situation.outline, lost, durable)
    # The weights depend on norms that only trainers know. Whether there are sources does not.
    return plan_reinitialisation(
        situation.outline,
        lost,
        version=situation.step,
        norms_sq={},
        left=left,
        policy=policy,
        ranks_per_stage=1 + max(s.inner or 0 for s in situation.stages),
    )


def _halved(answer: Reinitialisation) -> str:
    """Return why a stage of which other inner ranks live stays lost; empty if there is none.

    What inner ranks hold in copies must stay the same on all of them. A rank that is made anew has
    no moments, and those that live have theirs: the next step would tear the copies apart.
    """
    for place in answer.positions:
        if any(s.kind is SourceKind.INNER_RANK for b in place.blocks for s in b.sources):
            return (
                f"inner rank {place.stage}.{place.inner} is lost without the others of its stage, "
                "whose optimizers know more of the parameters that they hold in copies"
            )
    return ""


def _condition(situation: Situation) -> str:
    """Return what would have to change for the job to go on."""
    if _places(situation) > situation.free_slots:
        have = count(situation.free_slots, "free trainer") if situation.free_slots else "none"
        need = count(_places(situation), "free trainer")
        return f"{_stages(_empty(situation))} no living cell: needs {need}, {have} there"
    if _without_state(situation):
        return f"{_stages(_without_state(situation))} no exact source"
    return "nothing is lost"


def _stages(stages: list[StageHolders]) -> str:
    names = [str(s.stage) if s.inner is None else f"{s.stage}.{s.inner}" for s in stages]
    what = "stage" if all(s.inner is None for s in stages) else "inner rank"
    if len(stages) == 1:
        return f"{what} {names[0]} has"
    return f"{what}s {', '.join(names)} have"


_TESTS: dict[Row, Callable[[Situation], tuple[bool, str]]] = {
    Row.HAND_OVER: _hand_over,
    Row.RECHECK: _recheck,
    Row.MASK: _mask,
    Row.REPLAY: _replay,
    Row.RESTART: _restart,
    Row.APPROXIMATE: judge_approximate,
}
