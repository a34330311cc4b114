"""Sees each operator of a passage, as torch's dispatcher shows it, and what it reads and writes.

Below autograd each kernel is one call: that is an operator. Views cost nothing and are none; who
reads a view reads what lies there. What lies in memory has a name (:mod:`contents`), so operators
make a graph of names whatever memory is reused.

Values that the host reads decide what is called next. So they count as results: a wrong one must
not stay unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.operators import Origin, Pass
from mainstay_train.checks.collectives import REPEATED, SILENT
from mainstay_train.checks.planned import Window
from mainstay_train.dmr.contents import Contents
from mainstay_train.dmr.timers import Timer
from mainstay_train.kernels import dispatch
from mainstay_train.kernels.dispatch import Allocated, Effects, kernel_of, name_of
from mainstay_train.kernels.regions import Region
from mainstay_train.kernels.twins import Overwritten

FIELD = "spec.workload.entrypoint"
HOST_READS = frozenset({"tolist", "numpy", "__array__"})
"""Methods by which the host reads a tensor without a call of the dispatcher."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator of a passage."""

    block: int
    """In the model."""
    in_pass: Pass
    ordinal: int
    """Its place among the operators of its block and pass."""
    name: str
    inputs: tuple[str, ...]
    """Names of tensors; of parts of memory, where a tensor was written in parts."""
    outputs: tuple[str, ...]
    overwrites: tuple[str, ...]
    shapes: Shapes
    """Of the tensors that it is given and returns."""
    timed: int
    """Its number among the timed calls."""
    waits: bool = True
    """Whether it can be executed again later: :func:`~mainstay_train.kernels.dispatch.may_wait`."""

    @property
    def id(self) -> str:
        """Return its identity in the stage, as the profile has it."""
        return f"{self.block}/{self.in_pass.value}/{self.ordinal}"


@dataclass(slots=True, kw_only=True)
class Passage:
    """All that was seen of one micro-batch's way through a stage."""

    blocks: dict[int, str] = field(default_factory=dict)
    """Names of blocks by number."""
    calls: list[Call] = field(default_factory=list)
    """In the order of their first execution."""
    seconds: list[float] = field(default_factory=list)
    """Of each call."""
    tensors: dict[str, tuple[int, Origin]] = field(default_factory=dict)
    """Bytes and origin of each tensor."""
    recomputed: set[str] = field(default_factory=set)
    """Calls of a forward that was executed again for the backward."""
    again: dict[int, list[str]] = field(default_factory=dict)
    """By block: calls that were made where its forward ran again, in order. Empty strings: calls
    that its forward has not made."""
    results: dict[str, None] = field(default_factory=dict)
    """Tensors that are a gradient, leave the stage, or are read by the host; an ordered set."""
    waits: list[tuple[str, int]] = field(default_factory=list)
    """The waits for what comes of it, by their windows' names, each with the number of calls
    before it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of a passage that calls belong to."""

    block: int
    in_pass: Pass
    again: bool
    """Whether a forward is executed again."""


class PassageRecord:
    """Records the operators of one passage, as it is told of each call.

    Nothing is recorded before :meth:`enter`.

    Args:
        timer: of the device that computes.
    """

    def __init__(self, timer: Timer) -> None:
        self.passage = Passage()
        self._timer = timer
        self._num_timed = 0
        self._contents, self._allocated = Contents(), Allocated()
        self._place: _Place | None = None
        self._ordinals: Counter[tuple[int, Pass]] = Counter()
        self._num_received = 0
        self.before_weights: Callable[[], None] = _do_nothing
        """Called once, when the first weight pass begins."""
        self._first: dict[tuple[int, str], list[Call]] = {}
        """Calls of each block's forward that were not yet executed again, by what they compute."""
        self.host_reads = _HostReads(self)
        """Sees what the host reads, while it is on."""

    def enter(self, block: int, name: str, in_pass: Pass, *, again: bool = False) -> None:
        """Say what comes next.

        Args:
            block: its number in the model.
            name: of the block.
            in_pass: of the block.
            again: whether its forward is executed again, for the backward.
        """
        if in_pass is Pass.WEIGHT:
            begin, self.before_weights = self.before_weights, _do_nothing
            begin()
        self.passage.blocks[block] = name
        self._place = _Place(block, in_pass, again)

    def leave(self) -> None:
        """Say that what comes next belongs to no block."""
        self._place = None

    def has_forward(self, block: int) -> bool:
        """Return whether the forward of a block was recorded."""
        return (block, Pass.FORWARD) in self._ordinals

    def declare(self, tensor: torch.Tensor, name: str, origin: Origin) -> None:
        """Say what a tensor is that no operator makes."""
        if not self._contents.knows(tensor):
            self._contents.allocate(tensor)
        self._note(name, self._contents.put(tensor, name), origin)

    def receive(self, window: Window, tensor: torch.Tensor) -> None:
        """See what has come from another stage."""
        self.passage.waits.append((window.name, len(self.passage.calls)))
        self.declare(tensor, window.content, Origin.RECEIVED)

    def declare_unknown(self, tensor: torch.Tensor, name: str) -> None:
        """Say what all memory of an addressed tensor is, unless something is known of it."""
        if not self._contents.knows(tensor):
            self._note(name, self._contents.put_all(tensor, name), Origin.ADDRESSED)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Say that a tensor's memory holds nothing yet."""
        self._contents.allocate(tensor)

    def add_result(self, tensor: torch.Tensor) -> None:
        """Say that a tensor is a gradient, leaves the stage, or is read by the host."""
        for content in self._contents.covered(tensor):
            self.passage.results[content.name] = None

    def exchange(self, given: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """See what inner ranks have computed together, and what this one has given for it."""
        for tensor in given:
            self.add_result(tensor)
        self._num_received += 1
        self.declare(result, f"collective.{self._num_received}", Origin.RECEIVED)

    def finish(self) -> Passage:
        """Return what was seen; waits for the device."""
        taken_s = self._timer.seconds()
        self.passage.seconds = [taken_s[call.timed] for call in self.passage.calls]
        return self.passage

    def begin(self) -> None:
        """A call begins."""
        self._timer.begin()

    def end(self) -> None:
        """It has been given to the device."""
        self._timer.end()
        self._num_timed += 1

    def _fail(self, problem: str) -> None:
        assert self._place is not None
        name = self.passage.blocks[self._place.block]
        raise InvalidSpecError(FIELD, f"block {name!r} {problem}")

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
        """Record a call that was just made, and timed, if it is an operator.

        Returns:
            Its identity, or that of the call whose second execution it is; None: it is no operator.

        Raises:
            InvalidSpecError: it reads what nobody has written.
        """
        if self._place is None:
            return None
        kernel = kernel_of(func)
        operands = kernel.operands(args, kwargs)
        effects = Effects.of(kernel, operands, result)
        if kernel.allocates:
            self._allocated.see(kernel, result)
            for tensor in effects.made:
                self._contents.allocate(tensor)
        elif effects.made or effects.written:
            return self._add(func, args, kwargs, operands, effects)
        elif not effects.returned:
            for tensor, _ in operands:
                self.add_result(tensor)
        return None

    def _add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        operands: list[tuple[torch.Tensor, bool]],
        effects: Effects,
    ) -> str | None:
        place = self._place
        assert place is not None
        inputs, overwrites = self._read(func, operands)
        what = repr((name_of(func, full=True), self._describe((args, kwargs))))
        call = self._find_first(place.block, what) if place.again else None
        if place.again:
            self.passage.again.setdefault(place.block, []).append(call.id if call else "")
        if call is None:
            # What a recompute computes beyond the forward is done once, in the backward.
            in_pass = Pass.BACKWARD if place.again else place.in_pass
            call = self._new_call(func, place.block, in_pass, inputs, overwrites)
        made, written = effects.made, effects.written
        names = call.outputs
        is_new = not names
        if is_new:
            names = _output_names(call.id, len(made) + len(written))
        sizes = [self._contents.put_all(t, n) for t, n in zip(made, names, strict=False)]
        rest = names[len(made) :]
        sizes += [self._contents.put(t, n) for t, n in zip(written, rest, strict=True)]
        if not is_new:
            return call.id
        for name, size in zip(names, sizes, strict=True):
            self._note(name, size, Origin.MADE)
        shapes = tuple(tuple(t.shape) for t in [*(t for t, _ in operands), *effects.returned])
        overwritten = Overwritten(operands, replaces=kernel_of(func).replaces)
        is_own = self._allocated.have(written) or place.in_pass is Pass.WEIGHT
        waits = dispatch.may_wait(
            kernel_of(func),
            args,
            kwargs,
            effects,
            reads_written=overwritten.has_contents or not is_own,
        )
        self._keep(replace(call, outputs=names, shapes=shapes, waits=waits), what)
        return call.id

    def _new_call(
        self, func: Any, block: int, in_pass: Pass, inputs: list[str], overwrites: list[str]
    ) -> Call:
        """Return the next call of a block and pass, without outputs."""
        ordinal = self._ordinals[block, in_pass]
        self._ordinals[block, in_pass] += 1
        return Call(
            block=block,
            in_pass=in_pass,
            ordinal=ordinal,
            name=name_of(func),
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=(),
            overwrites=tuple(dict.fromkeys(overwrites)),
            shapes=(),
            timed=self._num_timed - 1,
        )

    def _keep(self, call: Call, what: str) -> None:
        self.passage.calls.append(call)
        if call.in_pass is Pass.FORWARD:
            self._first.setdefault((call.block, what), []).append(call)

    def _find_first(self, block: int, what: str) -> Call | None:
        """Return the call of the forward that computes the same from the same inputs."""
        waiting = self._first.get((block, what))
        if not waiting:
            return None
        call = waiting.pop(0)
        self.passage.recomputed.add(call.id)
        return call

    def _read(
        self, func: Any, operands: list[tuple[torch.Tensor, bool]]
    ) -> tuple[list[str], list[str]]:
        """Return the names of what a call reads, and of what it overwrites."""
        inputs: list[str] = []
        overwrites: list[str] = []
        for tensor, is_written in operands:
            self.declare_unknown(tensor, f"constant.{len(self.passage.tensors)}")
            if is_written:
                # Replaced contents are read, too: what is not written of them stays.
                replaced = [content.name for content in self._contents.replaced(tensor)]
                inputs += replaced
                overwrites += replaced
                continue
            covered = self._contents.covered(tensor)
            if not covered and Region.of(tensor) is not None:
                self._fail(
                    f"calls {name_of(func)}, which reads memory that no operator has written: "
                    "something computes in it past torch's dispatcher, and cannot be profiled"
                )
            inputs += [content.name for content in covered]
        return inputs, overwrites

    def _describe(self, tree: Any) -> Any:
        """Return what a call was given, with names and places for tensors."""

        def describe(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            held = tuple(content.name for content in self._contents.covered(leaf))
            return (held, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype)

        return tree_map(describe, tree)

    def _note(self, name: str, size: int, origin: Origin) -> None:
        self.passage.tensors[name] = (size, origin)


class Recorder(PassageRecord, TorchDispatchMode):
    """Records the operators of one passage while it is on.

    Args:
        timer: of the device that computes.
    """

    def __init__(self, timer: Timer) -> None:
        PassageRecord.__init__(self, timer)
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call] # torch has no types here

    def __enter__(self) -> Any:
        self.host_reads.__enter__()  # type: ignore[no-untyped-call]
        return TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)  # type: ignore[no-untyped-call]
        self.host_reads.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and record it, if it is an operator."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor of parts: what is done to the parts comes next
        kwargs = kwargs or {}
        if self._place is None:
            return func(*args, **kwargs)
        name = kernel_of(func).name
        if name in REPEATED:
            result = func(*args, **kwargs)
            self.exchange(dispatch.tensors_in(tuple(args)), result)
            return result
        if name in SILENT:
            return func(*args, **kwargs)
        self._refuse(func, args, kwargs)
        result = self._run(func, args, kwargs)
        self.see(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.begin()
        result = func(*args, **kwargs)
        self.end()
        return result

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if kernel_of(func).is_seeded and dispatch.draws(func, args, kwargs):
            self._fail(
                f"calls {name_of(func)}, which draws random numbers: executed again it would draw "
                "others. A block that draws cannot be profiled; leave out what draws (dropout: 0)"
            )
        if kernel_of(func).communicates:
            self._fail(
                f"calls the collective {name_of(func)}, whose operands do not say what it writes; "
                "a block that calls functional collectives alone can be profiled"
            )


class _HostReads(TorchFunctionMode):
    """Sees where Python reads tensors of the host's memory, which the dispatcher does not show."""

    def __init__(self, recorder: PassageRecord) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is read."""
        del types
        if getattr(func, "__name__", "") in HOST_READS and args:
            self._recorder.add_result(args[0])
        return func(*args, **(kwargs or {}))


def _output_names(call: str, number: int) -> tuple[str, ...]:
    return (call,) if number == 1 else tuple(f"{call}#{index}" for index in range(number))


def _do_nothing() -> None:
    pass
