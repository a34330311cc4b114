"""Executes each kernel of a trainer's work a second time, and repairs what was computed wrongly.

Both executions have the same inputs, and their outputs are compared as bits. If they differ, a
third execution says which of them was wrong (:mod:`mainstay_core.dmr.verdicts`). Nobody has used
the outputs yet, so a wrong primary execution is repaired in place. This is SpareTrain's naive dual
modular redundancy (section 3) with a third execution in place of its rollback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch

from mainstay_core.base.bounds import MAX_NAME, cut
from mainstay_core.base.ids import PodUid, Slot
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Flip, Where
from mainstay_core.dmr.operators import MAX_OPERANDS, MAX_OPERATORS, Pass
from mainstay_core.dmr.schedule import Later
from mainstay_core.dmr.settings import PLANNED, CheckRules, Mode, PlanName
from mainstay_core.dmr.verdicts import Judgement, Verdict
from mainstay_core.job.config import JobConfig
from mainstay_core.planning.routes import Extent, Way
from mainstay_train.checks import late
from mainstay_train.checks.collectives import Hears
from mainstay_train.checks.executions import CheckedKernels
from mainstay_train.checks.flags import Flags
from mainstay_train.checks.flips import FlipOrders, Missed
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.planned import (
    NO_STANDING,
    Flow,
    Orders,
    Planner,
    Spot,
    Tell,
    Window,
)
from mainstay_train.checks.prices import Prices
from mainstay_train.checks.replays import Replays
from mainstay_train.checks.scopes import UNCHECKED, Scope
from mainstay_train.checks.waiting import WaitingChecks
from mainstay_train.kernels import bits
from mainstay_train.kernels.calls import Call, UnreliableDeviceError
from mainstay_train.kernels.dispatch import Effects, key_of
from mainstay_train.model import compilation

logger = logging.getLogger(__name__)

EXCHANGE = "exchange"
"""Stands for a kernel: what comes from other cells in a reduction."""
MAX_TOLD = 64
"""Findings of one step that a trainer tells: a device that is wrong in most kernels must not keep
its supervisor from anything else. All are repaired."""
WHENEVER = Later(window=None, expected_s=0.0)
"""Until when a check waits of which no plan was made beforehand."""
NOWHERE = Slot(pod=PodUid("none"), index=0)
"""The slot of a checker that belongs to no trainer."""


class Checks:
    """The checks of one trainer.

    Args:
        mode: which kernels are executed twice.
        slot: of the trainer.
        tell: called with each finding as soon as it is judged, by the thread that computes.
        miss: called with each flip of which nothing came that it names, once its step is over.
        can_flip: whether flips can be put in: compiled code shows no kernels.
        waiting_bytes: what checks that wait may retain; 0: none waits.
        plan: which checks wait, where some may.
        said: the job's mode as people know it, where kernels are tried in another one.
        flags: comparisons that the host has not looked at; None: of devices other than the CPU.
    """

    def __init__(
        self,
        mode: Mode = Mode.OFF,
        slot: Slot = NOWHERE,
        tell: Callable[[Finding], None] = lambda _: None,
        *,
        miss: Callable[[Missed], None] = lambda _: None,
        can_flip: bool = True,
        waiting_bytes: int = 0,
        plan: PlanName = PlanName.DYNAMIC,
        said: Mode | None = None,
        flags: Flags | None = None,
    ) -> None:
        self._mode, self._slot, self._tell = mode, slot, tell
        self._said = said
        self._can_flip, self._miss = can_flip, miss
        self._told_in, self._num_told = -1, 0
        self._orders = FlipOrders()
        self._broken: UnreliableDeviceError | None = None
        self._prices = Prices()
        self.step = 0
        """The step at hand."""
        self.void: set[int] = set()
        """Shard types of the step at hand that do not count: something was computed from what was
        found wrong afterwards. Until their partials are dropped."""
        self.wrong_sum = ""
        """The problem of a sum that this rank has given to others, until the next reduction."""
        self.flags = Flags() if flags is None else flags
        """Of what a device has compared."""
        self.waiting = WaitingChecks(waiting_bytes if self.compares else 0, self.flags.pace)
        """Of the blocks' passes, with plan Dynamic."""
        self.replays = Replays(self)
        """Segments of blocks that wait among them."""
        self._plan, self._planned = plan, Orders()
        self._computes, self._is_warm = False, False
        """Whether the program at hand computes a step, and whether the stage has completed one.
        What blocks make once and keep, as tables, is made in the first one: nothing waits there,
        so that it is right before it is kept."""
        self.planner: Planner | None = None
        """Makes the plan of the stage at hand from its first steps; None: no plan is made."""
        self.given: frozenset[int] = frozenset()
        """Memories of the parameters: a check that waits takes no more for them."""
        self.gradient = 0
        """The memory in which the gradient of a type comes to be, once there is one: the same."""
        self.hears: Hears | None = None
        """Hears of the collectives of a type that other chains compute, too; None: nobody does."""
        self.await_cell: Callable[[], None] = lambda: None
        """Called before this rank waits for others of its cell in a collective of a block."""

    @classmethod
    def of(
        cls,
        config: JobConfig,
        slot: Slot,
        tell: Callable[[Finding], None],
        miss: Callable[[Missed], None],
    ) -> Self:
        """Return the checks of a job's trainer."""
        can_flip, memory = config.compile == compilation.OFF, config.dmr_memory_bytes
        return cls(
            config.dmr,
            slot,
            tell,
            miss=miss,
            can_flip=can_flip,
            waiting_bytes=memory,
            plan=config.dmr_plan,
        )

    def change(self, rules: CheckRules) -> None:
        """Check by other rules from now on; nothing waits any more."""
        self._mode, self._plan, self._planned = rules.mode, rules.plan, Orders()
        self.replays.begin_program({})
        self.waiting = WaitingChecks(rules.memory_bytes if self.compares else 0, self.flags.pace)
        self.flags.drop()

    @property
    def compares(self) -> bool:
        """Whether all kernels are executed twice."""
        return self._mode is Mode.FULL

    @property
    def piggybacks(self) -> bool:
        """Whether recomputes are compared with their forwards."""
        return self._mode is Mode.PIGGYBACK

    @property
    def spares_memory(self) -> bool:
        """Whether large results of two executions are not kept at a time: to keep both takes less
        time, so only where a plan has no memory, and beside a recompute that needs none.
        """
        return self.piggybacks or (self._plan is not PlanName.NAIVE and not self.waiting.is_used)

    @property
    def as_recomputed(self) -> bool:
        """Whether a forward that is recomputed later calls all that its recompute calls."""
        return self.piggybacks or (self.compares and self._plan in PLANNED)

    @property
    def shows_kernels(self) -> bool:
        """Whether kernels can be seen one by one: compiled code does not show them."""
        return self._can_flip

    def notes(self, block: int) -> bool:
        """Return whether the recompute of a block of the stage is compared with its forward."""
        return self.piggybacks or block in self._planned.piggyback

    def is_cheap(self, place: Place, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether a call is executed twice at once, though recomputes check its block."""
        if self.piggybacks:
            return self._prices.is_cheap(call, outputs)
        cheap = self._planned.cheap
        return bool(cheap) and Spot.of(place, call.ordinal, call.kernel.name) in cheap

    def later(self, place: Place, call: Call, effects: Effects) -> Later | None:
        """Return until when the check of a call waits; None: it does not."""
        if not self.waiting.is_used or not self._is_warm:
            return None
        later: Later | None = WHENEVER
        if self._plan in PLANNED:
            if not self._planned.later:
                return None
            later = self._planned.later.get(Spot.of(place, call.ordinal, call.kernel.name))
        if later is None or not late.can_wait(place, call, effects):
            return None
        # The host would wait for what a device has compared in a wait.
        return later if not call.is_far or self.flags_at(place) is not None else None

    def flags_at(self, place: Place) -> Flags | None:
        """Return where comparisons at a place are left; None: as in a replay, which has no vote."""
        is_ready = self._is_warm and self._computes
        return self.flags if is_ready and self.flags.may_be_at(place) else None

    def align(self, is_new: bool, tell: Tell) -> bool:
        """Have the ranks of a cell execute alike what they execute together.

        A forward whose recompute is compared with it is executed once, and else twice. With a
        collective in it that must be the same on all ranks of the cell, one that has just come
        included. So all of them call this before each program.

        Args:
            is_new: whether a block of this rank was never called.
            tell: tells the others.

        Returns:
            Whether some rank has such a block.
        """
        if not self.as_recomputed:
            return is_new  # everything is executed as often as on the others
        mine = self.planner.standing if self.planner is not None else NO_STANDING
        told = [tuple(each) for each in tell((is_new, *mine))]
        if self.planner is not None:
            self.planner.align([each[1:] for each in told])
        return any(each[0] for each in told)

    def begin_program(self, firsts: Mapping[Way, Flow]) -> None:
        """Say that the stage's program begins, and with which micro-batches.

        Args:
            firsts: the first of each way through the stage; empty: it computes no step anew.

        Raises:
            InvalidSpecError: the plan that the job names cannot be used.
        """
        self._computes = bool(firsts)
        if self.planner is not None:
            self._planned = self.planner.begin_program(firsts) or Orders()
        self.replays.begin_program(self._planned.parts)

    def end_program(self, *, completed: bool) -> None:
        """Say that the stage's program has ended."""
        self._is_warm = self._is_warm or (completed and self._computes)
        if self.planner is not None:
            self.planner.end_program(completed=completed)

    @contextmanager
    def window(self, window: Window, tensor: torch.Tensor) -> Iterator[None]:
        """Wait meanwhile for what comes from another stage.

        Args:
            window: the wait.
            tensor: is there after it.
        """
        began_s = self.now_s()
        yield
        if self.planner is not None:
            self.planner.received(window, tensor, self.now_s() - began_s)

    def now_s(self) -> float:
        """Return seconds that only grow, where a planner measures waits; else 0."""
        return self.planner.now_s() if self.planner is not None else 0.0

    def sent(self, flow: Flow, tensor: torch.Tensor) -> None:
        """Say what goes to another stage."""
        self.replays.read([tensor])
        if self.planner is not None:
            self.planner.sent(flow, tensor)

    def passed(self, flow: Flow, results: Sequence[object]) -> None:
        """Say that a micro-batch's passage is over: waits that begin now are for it as well.

        Args:
            flow: the micro-batch.
            results: what it has left beside gradients, if those are tensors.
        """
        self.waiting.passed(flow)
        self.replays.read(result for result in results if isinstance(result, torch.Tensor))
        if self.planner is not None:
            self.planner.passed(flow, results)

    def settle(self, types: Iterable[int]) -> None:
        """Execute all checks that wait of complete types, and forget all others.

        Args:
            types: that are about to count.

        Raises:
            Exception: what a check has raised; all others were executed.
        """
        if self.waiting:
            self.waiting.settle_all(types, self.void)
        self.waiting.drop()
        self.flags.send()

    def judge(self, types: Collection[int] | None = None) -> None:
        """Tell which comparisons on a device have found something: :meth:`Flags.judge`."""
        self.flags.judge(self, types)

    def drop(self) -> None:
        """Forget what waits: the types that it belongs to do not count."""
        self.waiting.drop()
        self.flags.drop()

    def reduced(self, waited_s: float) -> None:
        """Say that the step's gradient is reduced, and for how long that was waited for."""
        if self.planner is not None:
            self.planner.reduced(waited_s)

    def order(self, fault: str, step: int, phase: Phase, flip: Flip) -> bool:
        """Have a flip put in; return False if it cannot be.

        Args:
            fault: its id, for people.
            step: the step in which it is.
            phase: the phase of the step.
            flip: which kernel and which bit.
        """
        if not self._can_flip and flip.where is Where.COMPUTE:
            return False
        self._orders.add(fault, step, phase, flip)
        return True

    def take_orders(self, orders: FlipOrders) -> None:
        """Take flips from elsewhere, in place of those that wait; findings are counted anew."""
        self._orders, self._told_in = orders, -1

    def begin_stage(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say which memory a stage's parameters have; nothing of another stage is void there."""
        self.void.clear()
        self.flags.begin_step()
        self._is_warm = False
        self.planner, self._planned = None, Orders()
        self.replays.begin_program({})
        self.given = frozenset(map(key_of, parameters if self.waiting.is_used else ()))

    def begin_step(self, step: int) -> None:
        """Say which step is at hand; flips that found no kernel in earlier ones are told."""
        if step != self.step:
            self.step, self.hears = step, None
            self.flags.begin_step()
            if not self._orders.is_empty:
                for missed in self._orders.drop_before(step):
                    self.miss(missed)

    def miss(self, missed: Missed) -> None:
        """Tell that a flip was not put in; of one that may come yet the log alone has it."""
        if missed.may_come:
            logger.warning("flip %s waits for its kernel: %s", missed.fault, missed.why)
            return
        logger.warning("flip %s was not put in: %s", missed.fault, missed.why)
        self._miss(missed)

    def over(
        self,
        phase: Phase,
        step: int | None = None,
        shard_type: int | None = None,
        micro_batch: int | None = None,
        visit: int = -1,
        extent: Extent = Extent.WHOLE,
        orders: FlipOrders | None = None,
    ) -> Scope:
        """Return the scope of a part of the work.

        Args:
            phase: of the step.
            step: whose work it is; None: of the step at hand.
            shard_type: whose micro-batch is computed; None: none is.
            micro_batch: its number in the type.
            visit: place on its route.
            extent: the part of the stage through which that leads.
            orders: flips that may name what is computed; None: all that wait.

        Raises:
            UnreliableDeviceError: another thread has found that the device is unreliable.
        """
        hears = self.hears
        if hears is not None and hears.shard_type != shard_type:
            hears = None
        orders = self._orders if orders is None else orders
        is_whole = self.compares or not orders.is_empty or hears is not None
        is_compared = self.piggybacks and phase in (Phase.FORWARD, Phase.BACKWARD)
        if not is_whole and not is_compared:
            return UNCHECKED
        if self._broken is not None:
            raise self._broken
        step = self.step if step is None else step
        about = shard_type, micro_batch
        place = Place(step, phase, Pass.STEP, *about, visit=visit, extent=extent)
        seen = None
        if self.planner is not None and shard_type is not None and micro_batch is not None:
            seen = self.planner.seen((shard_type, micro_batch))
        return CheckedKernels(
            self,
            orders,
            place,
            self._said or self._mode,
            compares=self.compares,
            is_whole=is_whole,
            seen=seen,
            hears=hears,
        )

    def over_state(self) -> Scope:
        """Return the scope of what makes a state outside of a step, as a load: no flip names it."""
        return self.over(Phase.APPLY, orders=FlipOrders())

    def over_whole(self, phase: Phase) -> Scope:
        """Return the scope of kernels that the caller executes twice together: flips see each."""
        return UNCHECKED if self._orders.is_empty else self.over(phase)

    def arrive(self, received: torch.Tensor) -> None:
        """Put the flips of what comes from other cells into it.

        Args:
            received: in an exchange of the reduction.
        """
        for flip in self.take(Where.WIRE, Place(self.step, Phase.REDUCE), EXCHANGE):
            bits.flip_bit(received, flip.element, flip.bit)

    def awaits(self, where: Where) -> bool:
        """Return whether a flip waits that makes such a thing wrong."""
        return self._orders.awaits(where)

    def take(self, where: Where, place: Place, what: str) -> list[Flip]:
        """Return the flips of what no kernel has made; they wait no longer.

        Args:
            where: what they make wrong.
            place: in the program.
            what: its name for people.
        """
        return [] if self._orders.is_empty else self._orders.take(place, None, what, where)

    def tell(
        self,
        place: Place,
        *,
        ordinal: int,
        operator: str,
        output: int,
        num_elements: int,
        judgement: Judgement,
    ) -> None:
        """Tell what two executions that differed came to; of a step at most :data:`MAX_TOLD`.

        Args:
            place: of the kernel.
            ordinal: its number in its block and pass.
            operator: its name.
            output: the first one that differs.
            num_elements: elements of it that differ.
            judgement: on the three executions.

        Raises:
            UnreliableDeviceError: all three differ.
        """
        if self._told_in != place.step:
            self._told_in, self._num_told = place.step, 0
        self._num_told += 1
        if self._num_told == MAX_TOLD + 1:
            logger.warning("step %d: its further findings are not told", place.step)
        if self._num_told > MAX_TOLD and judgement.verdict is not Verdict.UNRELIABLE:
            return
        self._tell(
            Finding(
                step=place.step,
                slot=self._slot,
                in_pass=place.in_pass,
                shard_type=place.shard_type,
                micro_batch=place.micro_batch,
                block=None if place.name is None else cut(place.name, MAX_NAME),
                ordinal=min(ordinal, MAX_OPERATORS),
                operator=cut(operator, MAX_NAME),
                output=min(output, MAX_OPERANDS),
                num_elements=num_elements,
                verdict=judgement.verdict,
                remedy=judgement.remedy,
                reason=judgement.reason,
            )
        )
        if judgement.verdict is Verdict.UNRELIABLE:
            where = f"{place.in_pass.value} of {place.name or place.phase.value}"
            self._broken = UnreliableDeviceError(
                f"three executions of {operator} (#{ordinal}, {where}) had three results: this "
                "device computes wrongly again and again"
            )
            raise self._broken
