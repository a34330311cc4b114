"""Takes the batches of a program one after the other, and has the next one loaded meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from mainstay_core.dmr.flips import Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.planning.program import Action, Op
from mainstay_core.planning.routes import Extent
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.compute.loader import Loaded, Loader, Wanted
from mainstay_train.exact.draws import Address

BATCH = "batch"
"""Stands in findings for a kernel: the fetch of a batch."""


class Batches:
    """The batches that one rank's programs take.

    Args:
        loader: where samples come from.
        seed: the job's seed.
        num_steps: of the job: nothing is loaded ahead beyond them.
        loads: whether the stage takes any: the first and the last one do.
        tells_data: whether the rank says what was consumed.
        checks: of what is computed.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        seed: int,
        num_steps: int,
        loads: bool,
        tells_data: bool,
        checks: Checks,
    ) -> None:
        self._loader, self._seed, self._num_steps = loader, seed, num_steps
        self._loads, self.tells_data, self._checks = loads, tells_data, checks
        self._upcoming: deque[Wanted] = deque()
        """Those of the program in their order, and what probably comes behind it."""
        self._may_load_ahead = False

    def expect(self, program: Sequence[Action], step: int, *, is_again: bool) -> None:
        """Say which program begins.

        Args:
            program: actions of the stage.
            step: the step whose samples are used.
            is_again: whether a step is computed again.
        """
        if not self._loads:
            return
        forwards = [a for a in program if a.op is Op.FORWARD and self.takes(a)]
        flows = [(step, a.type, a.micro_batch) for a in forwards]
        if flows and step + 1 < self._num_steps and not is_again:
            # The next step begins likewise, unless the plan changes; then this one is dropped.
            flows.append((step + 1, *flows[0][1:]))
        self._upcoming.extend(Wanted(Address(self._seed, *flow), self.tells_data) for flow in flows)
        self._load_ahead()

    def follow(self) -> None:
        """Fetch batches by what the checks say from now on: they have changed."""
        self._loader.fetch_twice(twice=self._checks.compares)

    def takes(self, action: Action) -> bool:
        """Return whether a forward goes through the model's first block, or its last one."""
        if action.extent is Extent.WHOLE:
            return self._loads
        return action.extent is not Extent.LAYERS

    def has_computed(self) -> None:
        """Say that a forward is over.

        At their first call blocks are watched for draws from torch's generators. A data set may use
        these in its own thread: not meanwhile.
        """
        if not self._may_load_ahead:
            self._may_load_ahead = True
            self._load_ahead()

    def _load_ahead(self) -> None:
        if self._upcoming and self._may_load_ahead:
            self._loader.order(self._upcoming[0])

    def take(self, address: Address) -> Loaded:
        """Return the next batch of the program, which has this address."""
        wanted = self._upcoming.popleft()
        assert wanted.address == address, "forwards run in the program's order"
        place = Place(address.step, Phase.FORWARD, Pass.STEP, address.type, address.micro_batch)
        if flips := self._checks.take(Where.BATCH, place, BATCH):
            wanted = replace(wanted, flips=tuple(flips))  # it may be loaded: it is fetched anew
        loaded = self._loader.take(wanted)
        self._load_ahead()
        if loaded.judgement is not None:
            self._checks.tell(
                place,
                ordinal=0,
                operator=BATCH,
                output=0,
                num_elements=loaded.num_differing,
                judgement=loaded.judgement,
            )
        return loaded

    def drop(self) -> None:
        """Forget what is left: the program has ended."""
        self._upcoming.clear()
