"""Executes kernels twice while a scope is on, or compares them with what was noted of a forward.

It sees each call below autograd (a dispatch mode of torch). What it finds it tells the trainer's
checks (:mod:`mainstay_train.checks.checker`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import Part
from mainstay_core.dmr.settings import Mode
from mainstay_train.checks import at_once, by_piece, collectives, late, one_by_one
from mainstay_train.checks.collectives import SILENT
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.judging import Judging
from mainstay_train.checks.places import Place
from mainstay_train.checks.planned import Seen, Spot
from mainstay_train.checks.recomputes import FIELD, ForwardRecord
from mainstay_train.checks.scopes import Pushed
from mainstay_train.checks.sums import Once
from mainstay_train.kernels import dispatch
from mainstay_train.kernels.calls import Call, await_copies, comes_to_host, put
from mainstay_train.kernels.dispatch import Allocated, Effects, Kernel, kernel_of, key_of
from mainstay_train.kernels.twins import Overwritten, Twins

HIDDEN = ", whose kernels cannot be executed one by one; write it with plain operators"
SPARSE = " with a sparse tensor, whose bits are not compared; use dense tensors"
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_mode_of = torch._C._get_dispatch_mode
_PLAIN = torch._C._disabled_torch_dispatch_impl
_OVERLOAD = torch._ops.OpOverload


class CheckedKernels(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
    """A scope in which kernels are counted, and executed twice if that is wanted.

    Args:
        checks: hears of what was found.
        orders: flips that wait for a kernel.
        place: of the first kernel.
        mode: of the job, for people.
        compares: whether kernels are executed twice.
        is_whole: whether all kernels are counted; else those alone that are executed twice, noted
            or compared with what was noted, and the others cost nothing.
        seen: who records the passage; None: nobody does.
        hears: hears of collectives; None: nobody does.
    """

    def __init__(
        self,
        checks: Judging,
        orders: FlipOrders,
        place: Place,
        mode: Mode,
        *,
        compares: bool,
        is_whole: bool,
        seen: Seen | None = None,
        hears: collectives.Hears | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checks, self._orders, self._place, self._mode = checks, orders, place, mode
        self._compares, self._is_whole = compares, is_whole
        self._notes: ForwardRecord | None = None
        """Where what is made is noted; None: it is not."""
        self._noted: ForwardRecord | None = None
        """With what it is compared; None: with nothing."""
        self._ordinals: Counter[tuple[Pass, int | None]] = Counter()
        self._num_collectives = 0
        self._seen, self._hears = seen, hears
        self._spot: Spot | None = None
        """Of the kernel that is executed."""
        self._once: tuple[Once, Execution | None] | None = None
        """The kernels that are executed again together, and which execution this is."""
        self._flags = checks.flags_at(place) if compares else None
        """Where comparisons in the pass at hand are left; None: the host looks at once."""
        uses_allocated = checks.waiting.is_used or compares
        self._allocated = Allocated() if uses_allocated else None
        """The memory that this scope has made, as far as somebody asks; None: nobody does."""

    def __enter__(self) -> Self:
        if self._is_whole:
            super().__enter__()  # type: ignore[no-untyped-call]
        if self._seen is not None:
            self._seen.__enter__()
            self._seen.enter(self._place)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._seen is not None:
            self._seen.__exit__(*error)
        if self._is_whole:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def twice(self) -> AbstractContextManager[None]:
        """Have each kernel executed twice meanwhile."""
        return self._checking(compares=True)

    @contextmanager
    def once(self, once: Once, execution: Execution | None) -> Iterator[None]:
        """Have each kernel executed once meanwhile; the caller executes all of them again.

        Args:
            once: describes them; written in the primary execution, and read in others.
            execution: which one it is; None: the third.
        """
        key, before = (self._place.in_pass, self._place.block), self._compares
        ended_at = self._ordinals[key]
        if execution is Execution.PRIMARY:
            once.place, once.start = self._place, ended_at
        else:
            self._ordinals[key] = once.start
        self._once, self._compares = (once, execution), False
        try:
            yield
        finally:
            self._once, self._compares = None, before
            if execution is not Execution.PRIMARY:
                self._ordinals[key] = ended_at

    def note(self, record: ForwardRecord) -> AbstractContextManager[None]:
        """Note meanwhile what kernels make."""
        return self._checking(notes=record)

    @contextmanager
    def compare(self, record: ForwardRecord) -> Iterator[None]:
        """Compare meanwhile what kernels make with what was noted, unless it counts no more."""
        if self._place.shard_type in self._checks.void:
            with self._checking():  # inner ranks that do not know it execute each collective once
                yield
            return
        with self._checking(noted=record):
            yield
            if self._noted is record:
                record.end()

    @contextmanager
    def _checking(
        self,
        *,
        compares: bool = False,
        notes: ForwardRecord | None = None,
        noted: ForwardRecord | None = None,
    ) -> Iterator[None]:
        before = self._compares, self._notes, self._noted
        self._compares, self._notes, self._noted = compares, notes, noted
        try:
            with nullcontext() if self._is_whole else Pushed(self):
                yield
        finally:
            self._compares, self._notes, self._noted = before

    supports_higher_order_operators = True  # so that they are refused by name

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiles this mode, and to say so would import torch's compiler."""
        return False

    def enter(self, in_pass: Pass, block: int | None = None, name: str | None = None) -> None:
        """Say which pass comes next."""
        self._place = replace(self._place, in_pass=in_pass, block=block, name=name)
        self._flags = self._checks.flags_at(self._place)
        if self._seen is not None:
            self._seen.enter(self._place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, and check it if it computes something."""
        kwargs = kwargs or {}
        if _mode_of(_FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for shapes: no memory is there
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a tensor of parts: what is done to the parts comes next
        if not isinstance(func, _OVERLOAD):
            return self._pass(func, args, kwargs, f"{func}{HIDDEN}")  # as flexible attention is
        kernel = kernel_of(func)
        if self._seen is None:
            if kernel.computes:
                return self._execute(func, args, kwargs, kernel)
            if kernel.is_view:
                return func(*args, **kwargs)
        if kernel.name in collectives.REPEATED:
            return self._communicate(func, args, kwargs, kernel.name)
        if kernel.communicates and kernel.name not in SILENT:
            if self._hears is not None:
                self._hears.missed()
            self._let_write(dispatch.tensors_in([*args, *kwargs.values()]))
        if kernel.is_view or kernel.allocates or kernel.communicates:
            result = func(*args, **kwargs)
            if kernel.allocates:
                if self._allocated is not None:
                    self._allocated.see(kernel, result)
                if self._seen is not None:
                    self._seen.see(func, args, kwargs, result, None)
            return result
        seen, self._spot = self._seen, None
        if seen is None:
            return self._execute(func, args, kwargs, kernel)
        result = self._execute(func, args, kwargs, kernel)
        seen.see(func, args, kwargs, result, self._spot)
        return result

    def _let_write(self, given: Sequence[torch.Tensor]) -> None:
        """Say that a collective may read and write all that it is given.

        Its schema does not say which it writes.
        """
        self._checks.replays.read(given)
        if self._checks.waiting:
            self._checks.waiting.overwrite(map(key_of, given))

    def _execute(self, func: Any, args: Any, kwargs: Any, kernel: Kernel) -> Any:
        """Run a kernel, and check it."""
        if kernel.refused:
            return self._pass(func, args, kwargs, f"{kernel.name}{kernel.refused}")
        operands = kernel.operands(args, kwargs)
        writes = is_far = False
        for tensor, is_written in operands:
            if tensor.layout is not dispatch.STRIDED:
                return self._pass(func, args, kwargs, f"{kernel.name}{SPARSE}")
            writes = writes or is_written
            is_far = is_far or not tensor.is_cpu
        part = self._part_of(kernel, operands) if self._checks.replays.is_used else None
        if writes and self._checks.waiting:
            self._checks.waiting.overwrite(key_of(t) for t, is_written in operands if is_written)
        compares = self._compares
        if compares and not is_far and self._execute_by_piece(func, args, kwargs, kernel):
            return None
        overwritten = Overwritten(operands, replaces=kernel.replaces) if writes else None
        repeats = compares or self._noted is not None
        generator = self._generator_of(func, args, kwargs, repeats) if kernel.is_seeded else None
        drawn_from = generator.get_state() if generator is not None and repeats else None
        is_plain = compares and generator is None and not is_far
        if is_plain and self._checks.spares_memory and one_by_one.is_large(kernel, operands):
            whole = Call(func, args, kwargs, kernel, 0, overwritten, None, None, None, False)
            known = self._checks, self._place, whole, operands, partial(self._see_result, kernel)
            return one_by_one.execute(*known, self._enter_call, self._call)
        flags = self._flags_for(kernel, overwritten, is_far) if compares else None
        # What the call overwrites is kept: once for the checker, once for a third execution, which
        # there is only where the host looks at once.
        twins = overwritten.copy() if overwritten is not None and compares else None
        kept = None
        if overwritten is not None and repeats and overwritten.has_contents and flags is None:
            kept = overwritten.copy()
        result = func(*args, **kwargs) if self._seen is None else self._call(func, args, kwargs)
        if dispatch.has_sparse(result):
            return self._see_result(kernel, result)
        effects = Effects.of(kernel, operands, result)
        outputs = [*effects.new, *effects.written]
        if not outputs:
            return result
        if is_far and comes_to_host(outputs):
            await_copies(operands)
        given = func, args, kwargs, kernel, self._count()
        is_own = self._have_made(effects.written)
        call = Call(*given, overwritten, generator, drawn_from, effects.places, is_far, is_own)
        if self._seen is not None:
            self._spot = Spot.of(self._place, call.ordinal, kernel.name)
        flips = [] if self._orders.is_empty and self._once is None else self._flips_of(call)
        if flips:
            put(flips, (Execution.PRIMARY, Execution.BOTH), outputs)
            result = dispatch.retold(kernel, result, effects.new)
        if part is not None and not late.can_wait(self._place, call, effects):
            self._checks.replays.read(tensor for tensor, _ in operands)
            part = None
        if part is None or part.helps:
            result = self._check(call, effects, (result, outputs), flips, (twins, kept), flags)
        if part is not None:
            if part.helps:  # another result may count now
                effects = Effects.of(kernel, operands, result)
            self._checks.replays.add(part, self._place, call, effects, flips)
        return result

    def _execute_by_piece(self, func: Any, args: Any, kwargs: Any, kernel: Kernel) -> bool:
        """Run and check a kernel piece by piece, if that can be; it returns nothing."""
        pieces = by_piece.pieces_of(kernel, args, kwargs)
        if pieces is None:
            return False
        whole = Call(func, args, kwargs, kernel, 0, None, None, None, (), False)
        known = self._checks, self._place, whole, pieces
        by_piece.execute(*known, self._enter_call, self._call)
        return True

    def _see_result(self, kernel: Kernel, result: Any) -> Any:
        """Return what a kernel has made; what cannot be checked is refused (:meth:`_pass`)."""
        why = f"{kernel.name}{SPARSE}"
        return self._pass(lambda: result, (), {}, why) if dispatch.has_sparse(result) else result

    def _enter_call(self, call: Call) -> list[Flip]:
        """Number a call of which one result is kept at a time; return its flips."""
        call.ordinal = self._count()
        if self._seen is not None:
            self._spot = Spot.of(self._place, call.ordinal, call.kernel.name)
        return self._flips_of(call)

    def _check(
        self,
        call: Call,
        effects: Effects,
        primary: tuple[Any, list[torch.Tensor]],
        flips: list[Flip],
        copies: tuple[Twins | None, Twins | None],
        flags: Flags | None,
    ) -> Any:
        """Note or compare what a call has made, now or later; return the result that counts.

        Args:
            call: was executed once.
            effects: of that.
            primary: its result, with what it made and wrote.
            flips: of the call.
            copies: twins of what it overwrites, as that was before: for the checker, and for a
                third execution. None: there are none.
            flags: where comparisons are left; None: the host looks at once.
        """
        (result, outputs), (twins, kept) = primary, copies
        if self._notes is not None:
            if not self._is_cheap(call, outputs):
                self._notes.note(call.kernel.name, outputs)
                return result
            self._notes.pass_by(call.kernel.name)
            return at_once.check(self._checks, self._place, call, primary, flips, (None, None))
        if self._noted is not None:
            noted, self._noted = self._noted, None
            forward = noted.take(call.kernel.name)
            if forward is None:
                none = None, None
                result = at_once.check(self._checks, self._place, call, primary, flips, none)
                self._noted = noted
                return result
            result, goes_on = late.compare(self._checks, self._place, forward, call, primary, kept)
            self._noted = noted if goes_on else None
            return result
        if not self._compares:
            return result
        later = self._checks.later(self._place, call, effects)
        if later is not None:
            late.let_wait(self._checks, self._place, call, outputs, flips, later)
            return result
        if flags is not None and flags.takes(outputs):
            if self._allocated is not None:
                self._allocated.add(effects.new)  # what comes next may change it in place
            at_once.compare(flags, self._place, call, outputs, flips, twins)
            return result
        return at_once.check(self._checks, self._place, call, primary, flips, (twins, kept))

    def _have_made(self, written: Sequence[torch.Tensor]) -> bool:
        """Return whether what is written ends with the type: memory made here, or its gradient."""
        gradient = self._checks.gradient if self._place.in_pass is Pass.WEIGHT else None
        return self._allocated is not None and self._allocated.have(written, gradient)

    def _flags_for(
        self, kernel: Kernel, overwritten: Overwritten | None, is_far: bool
    ) -> Flags | None:
        """Return where the comparison of the next call may be left; None: the host looks at once.

        Memory that was there before has to be right at once: its wrong bits would outlive the type.
        """
        flags = self._flags
        if flags is None or not (is_far or flags.everywhere):
            return None
        if overwritten is None:
            return flags
        written = overwritten.written
        if overwritten.has_contents and (kernel.makes or not flags.takes(written)):
            return None  # a third execution may be needed, of what is overwritten by then
        return flags if self._have_made(written) else None

    def _is_cheap(self, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a call is executed twice though its recompute is to check it."""
        is_plain = call.overwritten is None and call.generator is None
        return is_plain and self._checks.is_cheap(self._place, call, outputs)

    def _part_of(
        self, kernel: Kernel, operands: Sequence[tuple[torch.Tensor, bool]]
    ) -> Part | None:
        """Return the part that the next call has in a segment; None: it has none.

        What other segments make and it reads is compared then.
        """
        replays, part = self._checks.replays, None
        at = self._place
        if at.block is not None:
            number = self._ordinals[at.in_pass, at.block]
            part = replays.part_of(Spot.of(at, number, kernel.name), at)
            if any(is_written and replays.has_made(tensor) for tensor, is_written in operands):
                part = None  # what a segment has made is copied before
        replays.read((tensor for tensor, _ in operands), part, at)
        return part

    def _flips_of(self, call: Call) -> list[Flip]:
        """Return the flips of a call, as those of a primary execution."""
        if self._once is None or self._once[1] is Execution.PRIMARY:
            flips = self._orders.take(self._place, call.ordinal, call.kernel.name)
            if flips and self._once is not None:
                self._once[0].flips[call.ordinal] = flips
            return flips
        once, execution = self._once
        return [
            replace(flip, execution=Execution.PRIMARY)
            for flip in once.flips.get(call.ordinal, ())
            if flip.sticky or (execution is not None and flip.execution is not Execution.PRIMARY)
        ]

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a kernel for the first time."""
        if self._seen is None:
            return func(*args, **kwargs)
        self._seen.begin()
        result = func(*args, **kwargs)
        self._seen.end()
        return result

    def _communicate(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> torch.Tensor:
        """Run a collective of the inner ranks, and check its result.

        Raises:
            UnreliableDeviceError: three executions had three results here.
        """
        self._checks.replays.read(dispatch.tensors_in([*args, *kwargs.values()]))
        at, number = self._place, self._num_collectives
        self._num_collectives += 1
        flips = self._orders.take(at, None, name)
        call = collectives.Call(func, args, kwargs, self._waited)
        tell = partial(self._checks.tell, at, ordinal=number, operator=name)
        result = call.check(flips, tell) if self._compares else call.run(flips)
        if self._notes is not None or self._noted is not None:
            result = call.waited(result)
        given = dispatch.tensors_in(tuple(args))
        if self._seen is not None:
            self._seen.exchange(given, result)
        if self._hears is not None:
            is_shared = name in collectives.SHARED
            self._hears.exchanged(at, given, collectives.waited(result), is_shared=is_shared)
        records = self._notes, self._noted
        self._noted = late.take_shared(self._checks, at, records, name, number, result)
        return result

    def _waited(self, result: torch.Tensor, group: str) -> torch.Tensor:
        """Return the result of a collective once it is there; checks are executed meanwhile."""
        if self._place.block is not None:  # in the thread that uses them
            collectives.use_wait(group, self._checks.waiting, self._checks.await_cell)
        return collectives.waited(result)

    def _pass(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], why: str) -> Any:
        """Call what cannot be checked.

        Raises:
            InvalidSpecError: kernels are to be executed twice.
        """
        if not self._compares and self._notes is None and self._noted is None:
            return func(*args, **kwargs)
        raise self._refusal(f"{why}, or use Off")

    def _refusal(self, what: str) -> InvalidSpecError:
        """Return the error that refuses a call, and says who calls."""
        at = self._place
        who = f"block {at.name!r}" if at.name else f"phase {at.phase}"
        return InvalidSpecError(FIELD, f"is {self._mode.value}, but {who} calls {what}")

    def _count(self) -> int:
        """Return the number of the next kernel of this place."""
        key = self._place.in_pass, self._place.block
        number = self._ordinals[key]
        self._ordinals[key] = number + 1
        return number

    def _generator_of(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], repeats: bool
    ) -> torch.Generator | None:
        """Return the generator from which a call draws; None: it does not draw.

        Raises:
            InvalidSpecError: it draws from a running generator, and may be repeated.
        """
        if not dispatch.draws(func, args, kwargs):
            return None
        generator = dispatch.generator_in(args, kwargs)
        if generator is not None or not repeats:
            return generator
        raise self._refusal(
            f"{dispatch.name_of(func)}, which draws from a running generator: executed again it "
            "would draw other numbers; use address.uniform(shape, site)"
        )
