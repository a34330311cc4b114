"""Compares executions on the device that made them, and reads all outcomes at once.

To look at a comparison the host waits until the device has come to it, and the device then waits
for the host's next call. So on a device other than the CPU a comparison leaves a flag in the
device's memory, and all flags are copied to the host together when a shard type is about to count
(SpareTrain, section 6: one flag that is read before the vote).

By then the values were used, and what both were made from is gone. So which of the two was wrong is
not known: the shard type is void, and what computes it anew looks at each comparison at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeGuard

import torch

from mainstay_core.dmr.verdicts import judge_late
from mainstay_train.base import device as devices
from mainstay_train.base.device import Moment
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.telling import Telling
from mainstay_train.kernels import bits
from mainstay_train.kernels.dispatch import is_real
from mainstay_train.kernels.imprints import Imprint

BLOCK = 1024
"""Comparisons of which the flags lie in one memory."""
PACE = 2
"""Checks that the device is given in a wait beyond the one that it executes."""
MAX_NOTED = 64 * BLOCK
"""Comparisons that wait for one copy to the host: what is known of each takes host memory. With
these they are copied, though no type is about to count."""


class Voiding(Telling, Protocol):
    """Checks of a trainer, as they hear of what makes a shard type void."""

    void: set[int]


class Compared(NamedTuple):
    """Two executions of a kernel, of which one output was compared."""

    place: Place
    ordinal: int
    operator: str
    output: int


@dataclass(frozen=True, slots=True)
class _Sent:
    """Flags on their way to the host, in the order of the comparisons."""

    compared: list[Compared]
    flags: torch.Tensor
    there: Moment


@dataclass(slots=True)
class Flags:
    """The comparisons of one trainer whose outcome the host does not know. One thread uses it."""

    everywhere: bool = False
    """Whether comparisons on the CPU are noted as well, as tests want it."""
    doubted: set[int] = field(default_factory=set)
    """Shard types of the step at hand in which something was found: when they are computed again,
    the host looks at each comparison at once, so that a third execution can judge."""
    _compared: list[Compared] = field(default_factory=list)
    """Not sent yet."""
    _blocks: list[torch.Tensor] = field(default_factory=list)
    """bool [BLOCK] each: whether something differs."""
    _slots: list[torch.Tensor] = field(default_factory=list)
    """Their elements: scalars."""
    _sent: list[_Sent] = field(default_factory=list)
    _paces: deque[Moment] = field(default_factory=deque)
    """Of the newest checks in waits."""

    def __bool__(self) -> bool:
        """Return whether any outcome is not known."""
        return bool(self._compared or self._sent)

    def may_be_at(self, place: Place) -> bool:
        """Return whether comparisons at a place may be left: in a block's pass, for a type."""
        return (
            place.phase in (Phase.FORWARD, Phase.BACKWARD)
            and place.block is not None
            and place.shard_type is not None
            and place.shard_type not in self.doubted
        )

    def takes(self, made: Sequence[torch.Tensor]) -> bool:
        """Return whether all that a call has made can be compared here: real numbers, in one place.

        A whole number that is wrong could end the process, as an index on a device does.
        """
        return all(map(is_real, made)) and self._are_here(made)

    def takes_kept(self, kept: list[torch.Tensor | Imprint]) -> TypeGuard[list[torch.Tensor]]:
        """Return whether what is left of an execution is compared here: all of it, in one place.

        Args:
            kept: real numbers, or imprints.
        """
        there = [one for one in kept if isinstance(one, torch.Tensor)]
        return len(there) == len(kept) and self._are_here(there)

    def _are_here(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors lie where the flags do; what was copied to the host does not."""
        device = self._blocks[0].device if self._blocks else None
        for tensor in tensors:
            if tensor.is_cpu and not self.everywhere:
                return False
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                return False
        return True

    def compare(
        self,
        place: Place,
        call: tuple[int, str],
        outputs: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
    ) -> None:
        """Compare the outputs of two executions of a call; nobody waits for the outcome.

        Args:
            place: of the call.
            call: its ordinal, and its kernel's name.
            outputs: of the first execution.
            found: of the second one.
        """
        for number, (one, other) in enumerate(zip(outputs, found, strict=True)):
            if len(self._compared) >= MAX_NOTED:
                self.send()
            at = len(self._compared)
            if at >= len(self._slots):
                block = torch.empty(BLOCK, dtype=torch.bool, device=one.device)
                self._blocks.append(block)
                self._slots += block.unbind()
            if one.shape == other.shape and one.dtype == other.dtype:
                bits.differ_into(self._slots[at], one, other)
            else:  # the host knows that already
                self._slots[at].fill_(True)
            self._compared.append(Compared(place, *call, number))

    def send(self) -> None:
        """Begin to copy the flags to the host, behind all that the device was given."""
        if not self._compared:
            return
        compared, self._compared = self._compared, []
        device, length = self._blocks[0].device, len(compared)
        flags = torch.empty(length, dtype=torch.bool, pin_memory=device.type == "cuda")
        for start, block in zip(range(0, length, BLOCK), self._blocks, strict=False):
            part = flags[start : start + BLOCK]
            part.copy_(block[: len(part)], non_blocking=True)
        self._sent.append(_Sent(compared, flags, devices.moment(device)))

    def judge(self, checks: Voiding, types: Collection[int] | None = None) -> None:
        """Tell of the comparisons that found something; their types are void.

        Waits until the device has come to the last one. Nothing is left afterwards.

        Args:
            checks: hear of it.
            types: whose outcomes count; those of other shard types are forgotten. None: all count.

        Raises:
            RuntimeError: the device failed.
        """
        told: set[tuple[Place, int]] = set()
        for compared in self.read():
            place = compared.place
            assert place.shard_type is not None, "no flag is left elsewhere"
            if types is not None and place.shard_type not in types:
                continue
            checks.void.add(place.shard_type)
            self.doubted.add(place.shard_type)
            if (place, compared.ordinal) in told:
                continue  # a further output of the same call
            told.add((place, compared.ordinal))
            checks.tell(
                place,
                ordinal=compared.ordinal,
                operator=compared.operator,
                output=compared.output,
                num_elements=0,
                judgement=judge_late(),
            )

    def read(self) -> list[Compared]:
        """Return the comparisons that found something; waits for the device."""
        self.send()
        sent, self._sent = self._sent, []
        found: list[Compared] = []
        for each in sent:
            each.there.wait()
            found += [each.compared[at] for at in each.flags.nonzero().view(-1).tolist()]
        return found

    def begin_step(self) -> None:
        """Forget all: another step begins, or another stage."""
        self.drop()
        self.doubted.clear()

    def pace(self) -> None:
        """Wait until the device has executed all checks of this wait but the newest ones.

        These are :data:`PACE`. So a wait for a message that is over is noticed soon, and few checks
        delay what comes next.
        """
        if not self._blocks:
            return
        self._paces.append(devices.moment(self._blocks[0].device))
        if len(self._paces) > PACE:
            self._paces.popleft().wait()

    def drop(self) -> None:
        """Forget all: what they belong to does not count."""
        self._compared, self._sent = [], []
