"""Replays segments of blocks: SpareTrain's activation-gradient checkpointing (section 5.2).

Of a segment only what it reads from outside is kept, and what of it others read. What it makes and
reads itself is known by its place in memory that is gone by then: the replay makes it again. A
memory that a later kernel is about to overwrite is copied before.

A plan says which tensors leave a segment. Whatever it says, a tensor that a kernel outside of the
segment reads is compared, and so is each that is still there when the segment is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.schedule import Part
from mainstay_core.dmr.verdicts import Remedy, judge
from mainstay_train.checks.late import (
    Judged,
    Kept,
    beside,
    digest_of,
    executed_again,
    is_same,
    num_differing,
)
from mainstay_train.checks.places import Place
from mainstay_train.checks.planned import Flow, Spot
from mainstay_train.checks.waiting import Waiting
from mainstay_train.kernels.calls import Call, put
from mainstay_train.kernels.dispatch import Effects, key_of, tensors_in
from mainstay_train.kernels.imprints import imprint
from mainstay_train.kernels.twins import ALIGNMENT_BYTES

Name = tuple[str, Flow]
"""A segment of one passage."""


@dataclass(frozen=True, slots=True)
class Inside:
    """A tensor that lies in memory which its segment makes."""

    memory: int
    """The number of the memory."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, memory: int, tensor: torch.Tensor) -> Inside:
        """Return where a tensor lies."""
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        offset, is_conj, is_neg = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        return cls(memory, tensor.dtype, size, stride, int(offset), is_conj, is_neg)

    def laid_out(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor as it lies in some memory."""
        found = torch.empty(0, dtype=self.dtype, device=storage.device)
        found.set_(storage, self.offset, self.size, self.stride)
        found = found.conj() if self.is_conj else found
        return torch._neg_view(found) if self.is_neg else found


@dataclass(slots=True)
class _Executed:
    """A kernel of a segment, as it was executed."""

    place: Place
    call: Call
    """With :class:`Inside` for what the segment makes."""
    flips: Sequence[Flip]
    """Those of its second execution, and sticky ones."""
    outputs: list[Inside]
    """Those that it made."""
    compared: dict[int, Kept] = field(default_factory=dict)
    """What is kept of them and of what it wrote behind them, by their place."""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument of a call with all that is no list changed."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(part, change) for part in value])
    return change(value)


class Segment:
    """A segment of one passage, as far as it was executed.

    Args:
        judged: hears of what is found.
        flow: whose passage it is.
    """

    def __init__(self, judged: Judged, flow: Flow) -> None:
        self._judged, self._flow = judged, flow
        self.executed: list[_Executed] = []
        self.memories: dict[int, tuple[int, StorageWeakRef]] = {}
        """By key, those that it has made and nobody has overwritten: the number of each. While
        somebody refers to a memory, if only so, no other one has its key."""
        self._num_memories = 0
        self.made: set[int] = set()
        """Keys of all memories that it has made, overwritten ones included."""
        self._hidden: dict[int, list[tuple[_Executed, int]]] = {}
        """By memory, the kernels that have made something in it that is not compared, and its
        place."""
        self.waits_as = ""
        """Its name among the checks that wait."""
        self._kept: set[int] = set()
        """Keys of the memories that it keeps."""
        self._beside: set[int] = set()
        """Of those that it writes, and keeps for that."""
        self.more: tuple[set[int], int] = (set(), 0)
        """Keys and bytes that it keeps more since they were taken."""

    def add(
        self,
        place: Place,
        call: Call,
        results: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        compared: Iterable[int],
        flips: Sequence[Flip],
    ) -> None:
        """Add a kernel that was just executed.

        Args:
            place: of the call.
            call: see :func:`~mainstay_train.checks.late.can_wait`.
            results: what it made, and what it wrote, all of which is compared.
            compared: places of what it made that is compared.
            flips: of its second execution, and sticky ones.
        """
        outputs, written = results
        replaced = {id(tensor) for tensor in written}

        def take(value: Any) -> Any:
            # What it replaces is not read: it is only said where it lies.
            return value.detach() if id(value) in replaced else self._take(value)

        args = mapped(tuple(call.args), take)
        kwargs = {name: mapped(value, take) for name, value in call.kwargs.items()}
        inside = []
        for tensor in outputs:
            key = key_of(tensor)
            if key not in self.memories:
                weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self.memories[key] = self._num_memories, weak
                self._num_memories += 1
            inside.append(Inside.of(self.memories[key][0], tensor))
        kept = call.kernel, call.ordinal, call.overwritten, None, None, call.places, call.is_far
        done = _Executed(place, Call(call.func, args, kwargs, *kept), flips, inside)
        for number in compared:
            done.compared[number] = self._keep(outputs[number])
        for number, tensor in enumerate(outputs):
            self.made.add(key_of(tensor))
            if number not in done.compared:
                self._hidden.setdefault(inside[number].memory, []).append((done, number))
        for number, tensor in enumerate(written, len(outputs)):
            done.compared[number] = imprint(tensor)
        if written:
            counted, (keys, size_bytes) = self._kept | self._beside, self.more
            more = beside(counted, self._judged, written)
            self._beside |= more.keys()
            self.more = keys, size_bytes + sum(more.values())
        self.executed.append(done)

    def leave(self, tensor: torch.Tensor) -> None:
        """Have all that lies in a tensor's memory compared: another kernel reads it."""
        memory, _ = self.memories[key_of(tensor)]
        hidden = self._hidden.pop(memory, None)
        if hidden is None:
            return
        storage = tensor.untyped_storage()
        for done, number in hidden:
            done.compared[number] = self._keep(done.outputs[number].laid_out(storage))

    def copy(self, key: int) -> int | None:
        """Keep a copy of a memory, which is about to be overwritten, in its place.

        Returns:
            The copy's key; None if it would be aligned otherwise: kernels may choose their path by
            that.
        """
        copied: list[torch.UntypedStorage] = []
        if not self._can_copy(key):
            return None

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or key_of(value) != key:
                return value
            if not copied:
                copied.append(value.untyped_storage().clone())  # type: ignore[no-untyped-call]
            return Inside.of(0, value).laid_out(copied[0])

        for done in self.executed:
            call = done.call
            kwargs = {name: mapped(value, moved) for name, value in call.kwargs.items()}
            done.call = replace(call, args=mapped(tuple(call.args), moved), kwargs=kwargs)
            done.compared = {number: moved(tensor) for number, tensor in done.compared.items()}
        self.memories.pop(key, None)  # what lies there from now on is not of the segment
        if not copied:
            return None
        self._kept.discard(key)
        self._beside.discard(key)
        found = int(copied[0]._cdata)
        self._kept.add(found)
        return found

    def _can_copy(self, key: int) -> bool:
        """Return whether new memory is aligned as this one is: it begins where torch's does."""
        for done in self.executed:
            given = tensors_in([*done.call.args, *done.call.kwargs.values()])
            for tensor in (*given, *tensors_in([*done.compared.values()])):
                if key_of(tensor) == key:
                    return tensor.untyped_storage().data_ptr() % ALIGNMENT_BYTES == 0
        return False

    def _take(self, value: Any) -> Any:
        """Return what stands for an argument."""
        if not isinstance(value, torch.Tensor):
            return value
        known = self.memories.get(key_of(value))
        return self._keep(value) if known is None else Inside.of(known[0], value)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        key, (keys, size_bytes) = key_of(tensor), self.more
        if key not in self._kept:
            self._kept.add(key)
            is_counted = key in self._judged.given or key in self._beside
            taken = 0 if is_counted else tensor.untyped_storage().nbytes()
            self.more = keys | {key}, size_bytes + taken
        return tensor.detach()

    def check(self) -> None:
        """Replay it, and compare.

        Raises:
            UnreliableDeviceError: a third execution differs from both.
        """
        shard_type, _ = self._flow
        if shard_type in self._judged.void:
            return
        with torch.no_grad(), _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
            self._compare_alive()
            primary = [kept for done in self.executed for kept in done.compared.values()]
            found = self._replay((Execution.CHECKER, Execution.BOTH))
            pairs = zip(primary, found, strict=True)
            differing = next((n for n, pair in enumerate(pairs) if not is_same(*pair)), None)
            if differing is None:
                return
            executions = (primary, found, self._replay(()))
            judgement = judge(*(digest_of(one, primary) for one in executions), used=True)
            if judgement.remedy is Remedy.VOID_TYPE:
                self._judged.void.add(shard_type)
            done, output = self._compared_at(differing)
            self._judged.tell(
                done.place,
                ordinal=done.call.ordinal,
                operator=done.call.kernel.name,
                output=output,
                num_elements=num_differing(primary[differing], found[differing]),
                judgement=judgement,
            )

    def _compare_alive(self) -> None:
        """Have all compared that is there and may still be read."""
        for memory, weak in self.memories.values():
            if memory not in self._hidden:
                continue
            alive = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            storage = cast("torch.UntypedStorage | None", alive)
            if storage is None:
                continue
            for done, number in self._hidden.pop(memory):
                done.compared[number] = done.outputs[number].laid_out(storage)

    def _compared_at(self, number: int) -> tuple[_Executed, int]:
        flat = [(done, output) for done in self.executed for output in done.compared]
        return flat[number]

    def _replay(self, executions: Sequence[Execution]) -> list[torch.Tensor]:
        """Execute all of it again; return what is compared of that, in the order of the first.

        Args:
            executions: whose flips are put in; none: sticky ones alone.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        last = self._last_uses()
        found = []

        def fill(value: Any) -> Any:
            return value.laid_out(storages[value.memory]) if isinstance(value, Inside) else value

        for at, done in enumerate(self.executed):
            kwargs = {name: mapped(value, fill) for name, value in done.call.kwargs.items()}
            call = replace(done.call, args=mapped(tuple(done.call.args), fill), kwargs=kwargs)
            outputs = executed_again(call)
            put(done.flips, executions, outputs)
            if not executions:
                put([flip for flip in done.flips if flip.sticky], (Execution.BOTH,), outputs)
            for inside, output in zip(done.outputs, outputs, strict=False):  # the rest is written
                storages[inside.memory] = output.untyped_storage()
            found += [outputs[number] for number in done.compared]
            del outputs, call, kwargs
            for memory in last.get(at, ()):
                del storages[memory]
        return found

    def _last_uses(self) -> Mapping[int, list[int]]:
        """Return, by kernel, the memories that no later one reads."""
        uses: dict[int, int] = {}
        for at, done in enumerate(self.executed):
            for inside in done.outputs:
                uses[inside.memory] = at

            def note(value: Any, at: int = at) -> Any:
                if isinstance(value, Inside):
                    uses[value.memory] = at
                return value

            mapped(tuple(done.call.args), note)
            mapped(tuple(done.call.kwargs.values()), note)
        found: dict[int, list[int]] = {}
        for memory, at in uses.items():
            found.setdefault(at, []).append(memory)
        return found


class Replays:
    """The segments of a trainer that wait to be replayed.

    Args:
        judged: hears of what is found.
    """

    def __init__(self, judged: Judged) -> None:
        self._judged = judged
        self.parts: Mapping[Spot, Part] = {}
        """Of the plan."""
        self._segments: dict[Name, Segment] = {}
        """Those that wait."""
        self._closed: set[Name] = set()
        """Those of which some was replayed before all was executed: the rest is checked alone."""
        self._inside: dict[int, Segment] = {}
        """By key, the memories that they have made."""

    @property
    def is_used(self) -> bool:
        """Whether a plan has anything replayed."""
        return bool(self.parts or self._inside)

    def part_of(self, spot: Spot, place: Place) -> Part | None:
        """Return the part that a kernel has in a segment; None: it has none, or none any more."""
        part = self.parts.get(spot)
        if part is None or place.shard_type is None or place.shard_type in self._judged.void:
            return None  # what is void is checked at once
        return None if self._name_of(part, place) in self._closed else part

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in memory that a segment which waits has made."""
        return key_of(tensor) in self._inside

    @staticmethod
    def _name_of(part: Part, place: Place) -> Name:
        assert place.shard_type is not None
        return part.segment, (place.shard_type, place.micro_batch or 0)

    def read(
        self,
        tensors: Iterable[torch.Tensor],
        part: Part | None = None,
        place: Place | None = None,
    ) -> None:
        """Say what a kernel reads, or whoever reads past the dispatcher.

        Args:
            tensors: that are read.
            part: of the kernel in a segment; None: it has none.
            place: of the kernel.
        """
        if not self._inside:
            return
        own = None
        if part is not None and place is not None:
            own = self._segments.get(self._name_of(part, place))
        for tensor in tensors:
            key = key_of(tensor)
            segment = self._inside.get(key)
            if segment is not None and segment is not own and key in segment.memories:
                segment.leave(tensor)
                self._account(segment)

    def add(
        self,
        part: Part,
        place: Place,
        call: Call,
        effects: Effects,
        flips: Sequence[Flip],
    ) -> None:
        """Add a kernel that was just executed to its segment.

        Args:
            part: that it has.
            place: of the call.
            call: see :func:`~mainstay_train.checks.late.can_wait`.
            effects: of the call, as they count.
            flips: of the call.
        """
        outputs = effects.new
        name, waiting = self._name_of(part, place), self._judged.waiting
        if name not in self._segments:
            self._begin(name, part)
        segment = self._segments[name]
        keys = list(dict.fromkeys(map(key_of, outputs)))
        compared = [n for n, t in enumerate(outputs) if keys.index(key_of(t)) in part.compared]
        if part.helps:  # its own check has had the others
            flips = [flip for flip in flips if flip.sticky]
        segment.add(place, call, (outputs, effects.written), compared, flips)
        for key in keys:
            self._inside[key] = segment
        self._account(segment)
        if part.is_last and waiting.waits(segment.waits_as):
            waiting.complete(segment.waits_as)

    def _begin(self, name: Name, part: Part) -> None:
        _, (shard_type, micro_batch) = name
        segment = Segment(self._judged, (shard_type, micro_batch))
        segment.waits_as = self._judged.waiting.begin(
            Waiting(
                shard_type,
                set(),
                0,
                segment.check,
                micro_batch=micro_batch,
                window=part.window,
                expected_s=part.expected_s,
                copy=segment.copy,
                forget=partial(self._forget, name),
            )
        )
        self._segments[name] = segment

    def _account(self, segment: Segment) -> None:
        """Have what a segment keeps more counted."""
        (keys, size_bytes), segment.more = segment.more, (set(), 0)
        if not keys and not size_bytes:
            return
        self._judged.waiting.grow(segment.waits_as, keys, size_bytes)

    def _forget(self, name: Name) -> None:
        segment = self._segments.pop(name)
        self._closed.add(name)
        for key in segment.made:
            if self._inside.get(key) is segment:
                del self._inside[key]

    def begin_program(self, parts: Mapping[Spot, Part]) -> None:
        """Say that a program begins, in which nothing of an earlier one waits."""
        self.parts = parts
        self._closed.clear()
