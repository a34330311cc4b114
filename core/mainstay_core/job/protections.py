"""Lists the protections of a job, and says why it does not have the others.

A job's protections follow from its settings and from its entry. The entry is how the user's code
comes in (design section 6): as blocks, or as a training loop of its own. Trainers name it in their
fingerprint. The list is for people alone: no decision depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mainstay_core.base.shape import JobShape
from mainstay_core.base.words import count
from mainstay_core.dmr.settings import Mode
from mainstay_core.job.config import SnapshotConfig

BLOCKS, LOOP = "blocks", "loop"
ENTRY_KEY = "entry"
"""Entry of the fingerprint that names the kind of entry."""


@dataclass(frozen=True, slots=True)
class Protection:
    """One protection, and whether the job has it."""

    name: str
    given: bool
    why: str
    """What it is, or why the job does not have it."""


def entry_of(fingerprints: Mapping[str, Mapping[str, str]]) -> str:
    """Return the kind of entry that trainers have reported; empty while none has."""
    return next((f[ENTRY_KEY] for f in fingerprints.values() if ENTRY_KEY in f), "")


def protections_of(
    shape: JobShape,
    entry: str,
    snapshots: SnapshotConfig | None = None,
    dmr: Mode = Mode.OFF,
) -> tuple[Protection, ...]:
    """Return the protections of a job, in the order in which they are shown.

    Args:
        shape: the job's degrees.
        entry: ``blocks`` or ``loop``; empty if it is not known yet: then there are none.
        snapshots: how the state is kept in the memory of pods; None if it is not.
        dmr: which operators are executed twice and compared.
    """
    if not entry:
        return ()
    loop = entry == LOOP
    alone = shape.replicas == 1
    checkpoints = shape.checkpoint_every_steps > 0
    return (
        Protection(
            "mask",
            not alone,
            "parallelism.replicas is 1: nobody is left to go on"
            if alone
            else "the others go on in the same step when a replica is lost",
        ),
        Protection(
            "patch",
            not alone,
            "parallelism.replicas is 1: nobody else can compute its types"
            if alone
            else "what a lost replica had not computed is computed by the others",
        ),
        Protection("exact reduction", True, "the bits do not depend on who computes what"),
        Protection(
            "heal",
            not alone,
            "parallelism.replicas is 1: there is no other copy to heal from"
            if alone
            else "a newcomer copies the state from a living rank while the others train",
        ),
        Protection("ledger", True, "digests of every committed step"),
        Protection(
            "durable checkpoints",
            checkpoints,
            f"every {shape.checkpoint_every_steps} steps"
            if checkpoints
            else "checkpoint.everySteps is 0",
        ),
        Protection(
            "pipeline stages",
            not loop,
            "an own loop computes the whole model at once; bring it as blocks"
            if loop
            else f"the model is cut into {shape.stages} stages between its blocks",
        ),
        Protection(
            "replay",
            snapshots is not None,
            "a stage that nobody holds is made anew from memory, where each part is kept in "
            f"{count(1 + snapshots.peers, 'pod')}"
            if snapshots is not None
            else "snapshots.enabled is false",
        ),
        _checks(loop=loop, dmr=dmr),
    )


def _checks(*, loop: bool, dmr: Mode) -> Protection:
    """Return whether operators are executed twice and compared."""
    if loop and dmr is Mode.FULL:
        why = (
            "each work is computed a second time, at twice the cost of a step's computation, and "
            "compared by gradient and loss; sums, reduction and apply by operators"
        )
    elif dmr is Mode.FULL:
        why = "every operator is executed twice, and what is wrong is repaired or computed again"
    elif dmr is Mode.PIGGYBACK:
        why = (
            "recomputes are compared with their forwards; gradients, sums and apply are executed "
            "once (detection.dmr.mode: Full)"
        )
    else:
        why = "detection.dmr.mode is Off"
    given = dmr is Mode.FULL or (dmr is Mode.PIGGYBACK and not loop)
    return Protection("op-level checks", given, why)
