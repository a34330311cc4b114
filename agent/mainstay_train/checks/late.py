"""Checks kernels after their values were used, in what checks that wait retain."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.schedule import Later
from mainstay_core.dmr.verdicts import Judgement, Remedy, Verdict, judge
from mainstay_train.checks.collectives import waited
from mainstay_train.checks.flags import Flags, Voiding
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.checks.waiting import Waiting, WaitingChecks, detached, kept_by
from mainstay_train.kernels import bits, imprints
from mainstay_train.kernels.calls import Call, put, repaired
from mainstay_train.kernels.dispatch import Effects, key_of, may_wait
from mainstay_train.kernels.twins import Overwritten, Twins


class Judged(Voiding, Protocol):
    """Checks of a trainer, as they hear of what was found late."""

    flags: Flags
    waiting: WaitingChecks
    given: frozenset[int]
    gradient: int


def compare(
    checks: Judged,
    place: Place,
    forward: tuple[imprints.Imprint, ...],
    call: Call,
    mine: tuple[Any, list[torch.Tensor]],
    kept: Twins | None,
) -> tuple[Any, bool]:
    """Compare a recompute's call with the forward's.

    Args:
        checks: hears of what is found.
        place: of the call.
        forward: what is left of what the forward's call has made.
        call: of the recompute.
        mine: its result, with what it made and wrote.
        kept: twins of what it overwrites, as that was before; None if it reads none of it.

    Returns:
        The result that counts, and whether later calls can be compared: a forward that was wrong
        went on from that.

    Raises:
        UnreliableDeviceError: a third execution differs from both.
    """
    result, outputs = mine
    found = imprints.imprints(outputs)
    if forward == found:
        return result, True
    third_result, third = call.again(call.given_again(kept))
    pairs = enumerate(zip(forward, found, strict=False))
    differing = next((number for number, (one, other) in pairs if one != other), 0)
    executions = (forward, found, imprints.imprints(third))
    judgement = judge(*map(imprints.joined, executions), used=True, goes_on=True)
    if judgement.remedy is Remedy.VOID_TYPE and place.shard_type is not None:
        checks.void.add(place.shard_type)
    checks.tell(
        place,
        ordinal=call.ordinal,
        operator=call.kernel.name,
        output=differing,
        num_elements=0,
        judgement=judgement,
    )
    if judgement.remedy is not Remedy.REPAIR:
        return result, False
    return repaired(call, mine, (third_result, third)), True


def take_shared(
    checks: Judged,
    place: Place,
    records: tuple[ForwardRecord | None, ForwardRecord | None],
    kernel: str,
    ordinal: int,
    result: torch.Tensor,
) -> ForwardRecord | None:
    """Note what inner ranks have computed together, or compare it with what came in the forward.

    Where that differs any of them may have given something wrong. Whose kernel it was finds it; to
    go on comparing here would lay it to the kernel that comes next.

    Args:
        checks: hears of what is found.
        place: of the call.
        records: where it is noted, and with what it is compared; None: it is not.
        kernel: name of the collective.
        ordinal: its number among them.
        result: of the call.

    Returns:
        With what later calls are compared; None: with nothing.
    """
    notes, noted = records
    if notes is not None:
        notes.note(kernel, [waited(result)])
    if noted is None or noted.take(kernel) == imprints.imprints([waited(result)]):
        return noted
    if place.shard_type is not None:
        checks.void.add(place.shard_type)
    reason = (
        f"{kernel} (#{ordinal}) of {place.name or place.phase.value} gave other bits in the "
        "forward than in its recompute: some rank of the stage has put in something wrong"
    )
    judgement = Judgement(verdict=Verdict.WIRE, remedy=Remedy.VOID_TYPE, reason=reason)
    checks.tell(
        place,
        ordinal=ordinal,
        operator=kernel,
        output=0,
        num_elements=0,
        judgement=judgement,
    )
    return None


def can_wait(place: Place, call: Call, effects: Effects) -> bool:
    """Return whether a call's check may wait: in a pass of a block, and it changes no operand.

    What some memory takes in place of what it held may, too, as a product in a gradient's: an
    imprint is taken of it at once, and the second execution writes elsewhere. But memory that may
    outlive the passage, as a buffer that a block sets, has to be right at once: what is computed
    again does not set it again for sure.
    """
    reads_written = call.overwritten is not None and call.overwritten.has_contents
    return (
        place.phase in (Phase.FORWARD, Phase.BACKWARD)
        and place.block is not None
        and place.shard_type is not None
        and call.generator is None
        and may_wait(
            call.kernel,
            call.args,
            call.kwargs,
            effects,
            reads_written=reads_written or not call.is_own,
        )
    )


def executed_again(call: Call) -> list[torch.Tensor]:
    """Execute again a call that was kept; return what it makes, and what it writes elsewhere."""
    if call.overwritten is None:
        return call.again(None)[1]
    operands = call.kernel.operands(call.args, call.kwargs)
    return call.again(Overwritten(operands, replaces=True).copy())[1]


Kept = torch.Tensor | imprints.Imprint
"""What is left of a result: itself, or an imprint where its memory will hold something else."""


def keep(outputs: Sequence[torch.Tensor], num_written: int) -> list[Kept]:
    """Return what is kept of what a call has made, and written behind that."""
    num_made = len(outputs) - num_written
    return [*outputs[:num_made], *imprints.imprints(outputs[num_made:])]


def is_same(kept: Kept, found: torch.Tensor) -> bool:
    """Return whether another execution has made the same."""
    if isinstance(kept, torch.Tensor):
        return bits.are_equal(kept, found)
    return kept == imprints.imprint(found)


def digest_of(results: Sequence[Kept], kept: Sequence[Kept]) -> str:
    """Return a digest of an execution's results, to judge it beside others.

    Args:
        results: of the execution.
        kept: of the first one: where that has imprints alone, imprints count.
    """
    told: list[object] = []
    for result, of_first in zip(results, kept, strict=True):
        if not isinstance(result, torch.Tensor):
            told.append(result)
        elif isinstance(of_first, torch.Tensor):
            told.append(bits.digest_of([result]))
        else:
            told.append(imprints.imprint(result))
    return repr(told)


def let_wait(
    checks: Judged,
    place: Place,
    call: Call,
    outputs: list[torch.Tensor],
    flips: Sequence[Flip],
    later: Later,
) -> None:
    """Have the check of a call wait.

    Args:
        checks: hears of what will be found.
        place: of the call.
        call: see :func:`can_wait`; it is kept, without a graph.
        outputs: what it made and wrote.
        flips: of the call.
        later: until when it waits.
    """
    assert place.shard_type is not None
    call.args = detached(tuple(call.args))
    call.kwargs = {name: detached(value) for name, value in call.kwargs.items()}
    operands = call.kernel.operands(call.args, call.kwargs)
    num_written = sum(is_written for _, is_written in operands)
    kept = keep(detached(outputs), num_written)
    held = [tensor for tensor, is_written in operands if not is_written]
    held += [one for one in kept if isinstance(one, torch.Tensor)]
    keys, size_bytes = kept_by(held, checks.given)
    size_bytes += sum(beside(keys, checks, [t for t, w in operands if w]).values())
    execute = partial(_check, checks, place, call, kept, flips)
    checks.waiting.add(
        Waiting(
            place.shard_type,
            keys,
            size_bytes,
            execute,
            micro_batch=place.micro_batch or 0,
            window=later.window,
            expected_s=later.expected_s,
        )
    )


def beside(
    keys: Collection[int], checks: Judged, written: Sequence[torch.Tensor]
) -> dict[int, int]:
    """Return the memory that is kept beside what a check keeps, by key: that which it writes.

    Others may write there. What is there anyway is left out: parameters, and the gradient.

    Args:
        keys: of the memories that it keeps.
        checks: know what is there anyway.
        written: of the call.

    Returns:
        The bytes of each.
    """
    sizes = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in written}
    return {
        key: size
        for key, size in sizes.items()
        if key not in keys and key not in checks.given and key != checks.gradient
    }


def _check(
    checks: Judged, place: Place, call: Call, kept: list[Kept], flips: Sequence[Flip]
) -> None:
    """Execute again a call whose value was used.

    Args:
        checks: hears of what was found.
        place: of the call.
        call: see :func:`can_wait`.
        kept: of what it made and wrote.
        flips: of the call.

    Raises:
        UnreliableDeviceError: a third execution differs from both.
    """
    if place.shard_type is None or place.shard_type in checks.void:
        return
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        found = executed_again(call)
        put(flips, (Execution.CHECKER, Execution.BOTH), found)
        if checks.flags.takes_kept(kept):
            checks.flags.compare(place, (call.ordinal, call.kernel.name), kept, found)
            return
        pairs = enumerate(zip(kept, found, strict=True))
        differing = next((number for number, pair in pairs if not is_same(*pair)), None)
        if differing is None:
            return
        third = executed_again(call)
        judgement = judge(*(digest_of(one, kept) for one in (kept, found, third)), used=True)
        if judgement.remedy is Remedy.VOID_TYPE:
            checks.void.add(place.shard_type)
        checks.tell(
            place,
            ordinal=call.ordinal,
            operator=call.kernel.name,
            output=differing,
            num_elements=num_differing(kept[differing], found[differing]),
            judgement=judgement,
        )


def num_differing(kept: Kept, found: torch.Tensor) -> int:
    """Return how many elements differ; 0 where an imprint alone is left."""
    return bits.count_differing(kept, found) if isinstance(kept, torch.Tensor) else 0
