"""Tells what a call of torch's dispatcher is: what it reads and writes, and whether it can repeat.

Below autograd each kernel is one call. Views and allocations compute nothing. What a call does to
its operands is in its schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

ALLOCATING = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_permuted",
        "aten.empty_strided",
        "aten.new_empty",
        "aten.new_empty_strided",
    }
)
"""Calls that take memory and write nothing."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""Namespaces of calls that wait for other ranks."""
REPLACING = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
"""Calls in place that read nothing of what they overwrite, as those that write to ``out=``."""
UNSET: Mapping[str, frozenset[int]] = {
    "aten._scaled_dot_product_efficient_attention": frozenset({2, 3}),
    "aten._scaled_dot_product_flash_attention": frozenset({6, 7, 8}),
}
"""Results that a kernel returns without having written them, by their place: the state of the
generator of attention without dropout."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the dispatcher, as its schema describes it."""

    name: str
    """E.g. ``aten.mm``."""
    allocates: bool
    communicates: bool
    is_view: bool
    """Whether all that it returns lies in the memory of its operands, unwritten."""
    is_seeded: bool
    """Whether it can draw random numbers."""
    replaces: bool
    """Whether it reads nothing of what it overwrites."""
    arguments: tuple[tuple[str, bool], ...]
    """Name of each, and whether the call writes it."""

    def operands(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, bool]]:
        """Return each tensor that a call is given, and whether the call writes it."""
        found: list[tuple[torch.Tensor, bool]] = []
        for number, (name, is_written) in enumerate(self.arguments):
            value = args[number] if number < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                found.append((value, is_written))
                continue
            found += [(tensor, is_written) for tensor in tensors_in(value)]
        return found


@dataclass(frozen=True, slots=True)
class Effects:
    """The tensors that a call has made and written."""

    returned: list[torch.Tensor]
    made: list[torch.Tensor]
    """Those of them that lie in memory of their own."""
    written: list[torch.Tensor]
    """Operands."""

    @classmethod
    def of(cls, operands: Sequence[tuple[torch.Tensor, bool]], result: Any) -> Effects:
        """Return what a call has done.

        Args:
            operands: of the call, see :meth:`Kernel.operands`.
            result: of the call.
        """
        given = {key_of(tensor) for tensor, _ in operands}
        returned = tensors_in(result)
        made = {key_of(tensor): tensor for tensor in returned if key_of(tensor) not in given}
        written = [tensor for tensor, is_written in operands if is_written]
        return cls(returned, [*made.values()], written)


@cache
def kernel_of(func: Any) -> Kernel:
    """Return what is known of a function of the dispatcher (an ``OpOverload``)."""
    schema, name = func._schema, name_of(func)
    aliases = [returned.alias_info for returned in schema.returns]
    arguments = tuple((arg.name, _is_written(arg)) for arg in schema.arguments)
    writes = any(is_written for _, is_written in arguments)
    return Kernel(
        name=name,
        allocates=name in ALLOCATING,
        communicates=func.namespace in COLLECTIVES,
        is_view=not writes and bool(aliases) and all(alias is not None for alias in aliases),
        is_seeded=torch.Tag.nondeterministic_seeded in func.tags,
        replaces=name in REPLACING or schema.overload_name.endswith("out"),
        arguments=arguments,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def name_of(func: Any, *, full: bool = False) -> str:
    """Return the name of a kernel, e.g. ``aten.mm``; in full with its overload."""
    name = str(func)
    return name if full else ".".join(name.split(".")[:2])


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call that can draw random numbers does: attention draws for dropout only."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if value is None else value)
    return True


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result: one, several in lists, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def key_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, while that exists."""
    return int(tensor.untyped_storage()._cdata)
