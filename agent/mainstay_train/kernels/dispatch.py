"""Tells what a call of torch's dispatcher is: what it reads and writes, and whether it can repeat.

Below autograd each kernel is one call. Views and allocations compute nothing. What a call does to
its operands is in its schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALLOCATING = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.empty_permuted",
        "aten.empty_strided",
        "aten.new_empty",
        "aten.new_empty_strided",
        "aten.resize_",
        "aten.resize_as_",
        "aten.set_",
    }
)
"""Calls that take memory, or say which memory a tensor has, and write nothing."""
VIEWS = frozenset({"aten._unsafe_view"})
"""Views that do not say so in their schema."""
COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_dtensor", "symm_mem")
"""Namespaces of calls that wait for other ranks."""
REPLACING = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
"""Calls in place that read nothing of what they overwrite, as those that are given memory for their
results do (``out=``, ``grad_input=``)."""
UNSET: Mapping[str, frozenset[int]] = {
    "aten._cudnn_attention_forward": frozenset({6, 7, 8}),
    "aten._efficient_attention_forward": frozenset({2, 3}),
    "aten._flash_attention_forward": frozenset({2, 3, 4}),
    "aten._scaled_dot_product_cudnn_attention": frozenset({6, 7, 8}),
    "aten._scaled_dot_product_efficient_attention": frozenset({2, 3}),
    "aten._scaled_dot_product_flash_attention": frozenset({6, 7, 8}),
    "aten._scaled_dot_product_fused_attention_overrideable": frozenset({6, 7, 8}),
}
"""Results that a kernel returns without having written them, by their place in its schema: the
state of the generator of attention without dropout. What is no tensor counts as well, and a tensor
that is not there."""
TELLING = frozenset(
    {
        "aten._choose_qparams_per_tensor",
        "aten._local_scalar_dense",
        "aten._nested_tensor_from_mask_left_aligned",
        "aten.allclose",
        "aten.equal",
        "aten.fbgemm_linear_quantize_weight",
        "aten.is_nonzero",
    }
)
"""Calls of torch's own that tell the host a number which a tensor's elements say, as
``tensor.item()`` does. The others that return numbers say what a tensor is, as its size."""
REFUSED: Mapping[str, str] = {
    "aten.mkldnn_rnn_layer": (
        ", whose workspace it does not write whole, so that its bits differ each time; use "
        "nn.LSTMCell for each element of the sequence"
    ),
}
"""Kernels of torch's own that cannot be checked though they are pure, and what is said of them. Of
such a workspace the backward reads the part that is written: to compare none of it would leave that
unchecked."""
OPAQUE = ", which returns something that has no bits; have it return tensors and numbers alone"
STRIDED = torch.strided
NUMBERS = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""The type of a tensor that holds a number as it is."""
_TOLD = frozenset({"bool", "complex", "Device", "float", "int", "number", "str"})
"""Types of results that are no tensors and can be compared; lists of them can be, too."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the dispatcher, as its schema describes it."""

    name: str
    """E.g. ``aten.mm``."""
    allocates: bool
    communicates: bool
    is_view: bool
    """Whether all that it returns lies in the memory of its operands, unwritten."""
    computes: bool
    """Whether it is none of these three."""
    makes: bool
    """Whether it returns some memory that it was not given, or a number."""
    is_seeded: bool
    """Whether it can draw random numbers."""
    replaces: bool
    """Whether it reads nothing of what it overwrites."""
    told: tuple[int, ...]
    """Places of those results that are numbers or lists of them, computed of elements."""
    refused: str
    """Why it cannot be checked, for people, behind its name; empty: it can."""
    unset: frozenset[int]
    """See :data:`UNSET`."""
    is_pointwise: bool
    """Whether it computes each element from elements of its operands at the same place."""
    arguments: tuple[tuple[int, str, bool], ...]
    """Of those that can be tensors: place, name, and whether the call writes it."""

    @property
    def tells(self) -> bool:
        """Whether some result is a number."""
        return bool(self.told)

    def operands(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[torch.Tensor, bool]]:
        """Return each tensor that a call is given, and whether the call writes it."""
        found: list[tuple[torch.Tensor, bool]] = []
        num_given = len(args)
        for place, name, is_written in self.arguments:
            value = args[place] if place < num_given else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                found.append((value, is_written))
            elif value is not None:
                found += [(tensor, is_written) for tensor in tensors_in(value)]
        return found


class Effects(NamedTuple):
    """The tensors that a call has made and written."""

    returned: list[torch.Tensor]
    made: list[torch.Tensor]
    """Those of them that lie in memory of their own, one for each memory."""
    new: list[torch.Tensor]
    """All that lie in such memory and are set; and behind them what hold the numbers that it
    returned. Attention's backward may return three that share one memory."""
    places: tuple[int, ...] | None
    """Their places among all that it returned; None: it returned numbers."""
    written: list[torch.Tensor]
    """Operands."""

    @classmethod
    def of(
        cls, kernel: Kernel, operands: Sequence[tuple[torch.Tensor, bool]], result: Any
    ) -> Effects:
        """Return what a call has done.

        Args:
            kernel: that was called.
            operands: of the call, see :meth:`Kernel.operands`.
            result: of the call.
        """
        if isinstance(result, torch.Tensor):  # as most kernels return
            key, one = key_of(result), [result]
            written = [tensor for tensor, is_written in operands if is_written]
            if key not in [key_of(tensor) for tensor, _ in operands]:
                return cls(one, one, one, (0,), written)
            return cls(one, [], [], (), written)
        given = {key_of(tensor) for tensor, _ in operands}
        returned = tensors_in(result)
        keys = [key_of(tensor) for tensor in returned]
        made = {key: t for key, t in zip(keys, returned, strict=True) if key not in given}
        unset = {id(result[place]) for place in kernel.unset}
        places: tuple[int, ...] | None = tuple(
            number
            for number, key in enumerate(keys)
            if key in made and id(returned[number]) not in unset
        )
        new = [returned[number] for number in places or ()]
        if kernel.told:
            new, places = [*new, *_numbers(kernel, result)], None
        written = [tensor for tensor, is_written in operands if is_written]
        return cls(returned, [*made.values()], new, places, written)


def _numbers(kernel: Kernel, result: Any) -> list[torch.Tensor]:
    """Return tensors that hold what a call has told: one for each result that is no tensor."""
    results = result if isinstance(result, tuple) else (result,)
    return [_held(results[place]) for place in kernel.told]


def _held(value: Any) -> torch.Tensor:
    """Return a tensor that holds a number or a list of them, as bits or else as text."""
    values = value if isinstance(value, list | tuple) else [value]
    kinds = {type(each) for each in values}
    if len(kinds) == 1 and all(is_number(each) for each in values):
        return torch.tensor(value, dtype=NUMBERS[kinds.pop()], device="cpu")
    return torch.tensor([*repr(value).encode()], dtype=torch.uint8, device="cpu")


def retold(kernel: Kernel, result: Any, new: Sequence[torch.Tensor]) -> Any:
    """Return a call's result with the numbers that tensors hold in place of its own: a flip may
    have changed them.

    Args:
        kernel: that has returned it.
        result: of the call.
        new: see :attr:`Effects.new`.
    """
    if not kernel.told:
        return result
    held = dict(zip(kernel.told, new[len(new) - len(kernel.told) :], strict=True))
    results = result if isinstance(result, tuple) else (result,)
    told = [
        held[place].tolist() if place in held and held[place].dtype is not torch.uint8 else value
        for place, value in enumerate(results)
    ]
    return type(result)(told) if isinstance(result, tuple) else told[0]


def with_numbers_of(kernel: Kernel, result: Any, other: Any) -> Any:
    """Return a result with the numbers of another execution in place of its own."""
    if not isinstance(result, tuple):
        return other if kernel.told else result
    pairs = enumerate(zip(result, other, strict=True))
    return type(result)([two if place in kernel.told else one for place, (one, two) in pairs])


class Allocated:
    """The memories that have been made since something began."""

    def __init__(self) -> None:
        self._made: dict[int, StorageWeakRef] = {}
        """By key: while somebody refers to a memory, if only so, no other one has its key."""

    def see(self, kernel: Kernel, result: Any) -> None:
        """See an allocation."""
        if any(is_written for _, _, is_written in kernel.arguments):
            return  # it gives another size to a tensor that was there
        self.add(tensors_in(result))

    def add(self, made: Sequence[torch.Tensor]) -> None:
        """Count the memories of some tensors among them."""
        for tensor in made:
            weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._made.setdefault(key_of(tensor), weak)

    def have(self, tensors: Sequence[torch.Tensor], other: int | None = None) -> bool:
        """Return whether all of some tensors lie in such memories, or in one other, by its key."""
        return all((key := key_of(tensor)) in self._made or key == other for tensor in tensors)


_known: dict[int, tuple[Any, Kernel]] = {}
"""By id of a function, which is kept so that no other one gets its id."""


def kernel_of(func: Any) -> Kernel:
    """Return what is known of a function of the dispatcher (an ``OpOverload``)."""
    found = _known.get(id(func))  # to hash such a function takes longer
    if found is None:
        found = _known[id(func)] = func, _describe(func)
    return found[1]


def _describe(func: Any) -> Kernel:
    schema, name = func._schema, name_of(func)
    aliases = [returned.alias_info for returned in schema.returns]
    arguments = tuple(
        (place, arg.name, _is_written(arg))
        for place, arg in enumerate(schema.arguments)
        if not _is_plain(arg)
    )
    writes = any(_is_written(argument) for argument in schema.arguments)
    is_own, returned = func.namespace == "aten", {_core(each) for each in schema.returns}
    is_opaque = bool(arguments) and not is_own and not returned <= _TOLD | {"Tensor"}
    allocates, communicates = name in ALLOCATING, func.namespace in COLLECTIVES
    is_view = name in VIEWS or (
        not writes and bool(aliases) and all(alias is not None for alias in aliases)
    )
    return Kernel(
        name=name,
        allocates=allocates,
        communicates=communicates,
        is_view=is_view,
        computes=not (allocates or communicates or is_view),
        makes=any(alias is None for alias in aliases),
        is_seeded=torch.Tag.nondeterministic_seeded in func.tags,
        replaces=name in REPLACING or (writes and _is_given_memory(schema)),
        told=_told(schema) if name in TELLING or not is_own else (),
        refused=OPAQUE if is_opaque else REFUSED.get(name, ""),
        unset=UNSET.get(name, frozenset()),
        is_pointwise=torch.Tag.pointwise in func.tags,
        arguments=arguments,
    )


PLAIN = frozenset({"bool", "complex", "Device", "float", "Generator", "int", "number", "str"})
"""Types of arguments that hold no tensors; lists of them, and what may be absent, neither."""


def _is_plain(argument: Any) -> bool:
    return _core(argument) in PLAIN


def _core(argument: Any) -> str:
    """Return the type of an argument or a result, or of what its list has."""
    told = str(argument.type).replace("Optional[", "").replace("List[", "")
    return told.rstrip("]")


def _told(schema: Any) -> tuple[int, ...]:
    return tuple(place for place, each in enumerate(schema.returns) if _core(each) in _TOLD)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_given_memory(schema: Any) -> bool:
    """Return whether all that a call writes is memory which it is given for its results.

    Such memory can only be named, and comes back as a result. A kernel of somebody else may add to
    what can only be named, and return nothing. Of torch's own those that return nothing say it by
    their overload.
    """
    written = [argument for argument in schema.arguments if _is_written(argument)]
    if not all(argument.is_out for argument in written):
        return False
    if not schema.returns:
        return bool(schema.overload_name.endswith("out"))
    aliases = [result.alias_info for result in schema.returns]
    returned = {name for alias in aliases if alias is not None for name in alias.before_set}
    return all(argument.alias_info.before_set <= returned for argument in written)


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


def may_wait(
    kernel: Kernel, args: Any, kwargs: Any, effects: Effects, *, reads_written: bool = True
) -> bool:
    """Return whether a call can be executed again later: it draws nothing, and changes nothing that
    it reads.

    Whole numbers do not wait: as an index a wrong one would end the step before it is found. Nor
    does what a device writes into memory that it is given: the host would wait for its imprint.

    Args:
        kernel: that was called.
        args: of the call.
        kwargs: of the call.
        effects: of the call.
        reads_written: whether it reads some of what it overwrites, or may.
    """
    return (
        not (effects.written and reads_written)
        and not kernel.tells
        and not (kernel.is_seeded and generator_in(args, kwargs) is not None)
        and all(map(is_real, effects.new))
        and all(tensor.is_cpu and is_real(tensor) for tensor in effects.written)
    )


def generator_in(args: Any, kwargs: Any) -> torch.Generator | None:
    """Return the generator that a call is given to draw from, if any."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
    return next(given, None)


def is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers: neither whole ones nor truths."""
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result: one, several in lists, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def has_sparse(value: Any) -> bool:
    """Return whether some tensor of an argument or a result is sparse or the like.

    Such a tensor has no memory of its own to compare.
    """
    if isinstance(value, torch.Tensor):
        return value.layout is not STRIDED
    return any(tensor.layout is not STRIDED for tensor in tensors_in(value))


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a tensor can hold as it is."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) in NUMBERS


def key_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, while that exists."""
    return int(tensor.untyped_storage()._cdata)
