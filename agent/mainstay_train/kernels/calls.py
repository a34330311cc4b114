"""Keeps a call of a kernel so that it can be executed again, and repairs what it made wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mainstay_core.base.errors import MainstayError
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_train.base import device as devices
from mainstay_train.kernels import bits
from mainstay_train.kernels.dispatch import Effects, Kernel, tensors_in, with_numbers_of
from mainstay_train.kernels.twins import Overwritten, Twins


class UnreliableDeviceError(MainstayError):
    """Three executions of one kernel had three results: the device cannot be relied on."""


@dataclass(slots=True)
class Call:
    """One call of a kernel that computes something."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    kernel: Kernel
    ordinal: int
    overwritten: Overwritten | None
    """None: it writes to no operand."""
    generator: torch.Generator | None
    """From which it draws; None: it does not."""
    drawn_from: torch.Tensor | None
    """The generator's state before the call."""
    places: tuple[int, ...] | None
    """Of what it makes among what it returns, as the first execution has shown; None: it returns
    none of that."""
    is_far: bool
    """Whether an operand is not in the host's memory."""
    is_own: bool = False
    """Whether all that it writes lies in memory that its passage has made, or in the gradient of
    the type where that comes to be."""
    numbers: Sequence[int] | None = None
    """Of what it writes, among all that the call writes whose piece it is; None: it is whole."""

    def given_again(self, kept: Twins | None) -> Twins | None:
        """Return the twins for a further execution; ``kept``: those of what it reads there."""
        if kept is None and self.overwritten is not None:
            return self.overwritten.copy()  # whatever it holds is overwritten
        return kept

    def again(
        self, twins: Twins | None, see: Callable[[Any], None] = lambda _: None
    ) -> tuple[Any, list[torch.Tensor]]:
        """Execute it again; return its result, and what it has made and written.

        Args:
            twins: of what it overwrites, used up; None if it overwrites nothing.
            see: called with the result before anything is read of it.
        """
        args, kwargs = self.args, self.kwargs
        if self.generator is not None and self.drawn_from is not None:
            twin = torch.Generator(self.generator.device)
            twin.set_state(self.drawn_from)
            args = [twin if value is self.generator else value for value in args]
            kwargs = {k: twin if v is self.generator else v for k, v in kwargs.items()}
        if twins is not None:
            args = [twins.put(value) for value in args]
            kwargs = {name: twins.put(value) for name, value in kwargs.items()}
        result = self.func(*args, **kwargs)
        see(result)
        if self.places is None:
            new = Effects.of(self.kernel, self.kernel.operands(args, kwargs), result).new
        else:
            returned = tensors_in(result)
            new = [returned[place] for place in self.places]
        outputs = [*new, *(twins.written if twins is not None else ())]
        if self.is_far and comes_to_host(outputs):
            await_copies(self.kernel.operands(args, kwargs))
        return result, outputs


def comes_to_host(outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether some of what a call has made is in the host's memory."""
    return any([tensor.is_cpu for tensor in outputs])  # noqa: C419 - a generator takes longer


def await_copies(operands: Sequence[tuple[torch.Tensor, bool]]) -> None:
    """Wait for what a device copies to the host: it may come after its call has returned."""
    for device in {tensor.device for tensor, _ in operands if not tensor.is_cpu}:
        devices.moment(device).wait()


def repaired(
    call: Call, wrong: tuple[Any, list[torch.Tensor]], right: tuple[Any, list[torch.Tensor]]
) -> Any:
    """Give what a call made and wrote the bits of a right execution; return the result that counts.

    Args:
        call: was executed several times.
        wrong: result of the execution that goes on, with what it made and wrote.
        right: the same of one that was right.

    Raises:
        UnreliableDeviceError: the device does not even copy.
    """
    if call.overwritten is None:
        return right[0]  # all of it is new memory
    end = len(wrong[1]) - len(call.overwritten.written)
    for number, (tensor, found) in enumerate(zip(wrong[1], right[1], strict=True)):
        if end - len(call.kernel.told) <= number < end:
            continue  # it holds a number, which is not in memory of the call
        bits.overwrite(tensor, found)
        if not bits.are_equal(tensor, found):
            raise UnreliableDeviceError(
                f"what {call.kernel.name} computed wrongly could not be repaired: this device "
                "does not even copy"
            )
    return with_numbers_of(call.kernel, wrong[0], right[0])


def first_differing(outputs: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> int | None:
    """Return the first output in which two executions differ; None: in none."""
    for number, (one, other) in enumerate(zip(outputs, found, strict=True)):
        if not bits.are_equal(one, other):
            return number
    return None


def put(
    flips: Sequence[Flip], executions: Sequence[Execution], outputs: Sequence[torch.Tensor]
) -> None:
    """Put the flips of some executions into what an execution has made."""
    for flip in flips:
        if flip.execution in executions:
            output = outputs[flip.output % len(outputs)]
            bits.flip_bit(output, flip.element, flip.bit)
