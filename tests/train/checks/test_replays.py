"""Segments that are replayed from their boundary: what is kept, compared, copied and counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.schedule import Part
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase, Place
from mainstay_train.checks.planned import WHOLE, Orders, Spot
from mainstay_train.kernels.dispatch import key_of

TYPE = 3
SIZE = 16 * 16 * 4
X, W = (torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
Work = Callable[[], torch.Tensor]


class Kernels:
    """A pass of a block whose first kernels are a segment, of which the last one is compared."""

    def __init__(
        self,
        kernels: list[str],
        budget: int = 1 << 20,
        *,
        in_pass: Pass = Pass.FORWARD,
        phase: Phase = Phase.FORWARD,
        plan: PlanName = PlanName.AUTO,
    ) -> None:
        self._pass, self._phase = in_pass, phase
        self.found: list[Finding] = []
        self.checks = Checks(Mode.FULL, tell=self.found.append, waiting_bytes=budget, plan=plan)
        self.checks.begin_program({WHOLE: (TYPE, 0)})
        self.checks.end_program(completed=True)
        self.checks.given = frozenset({key_of(W)})
        last = len(kernels) - 1
        parts = {
            Spot(phase, in_pass, 0, number, kernel): Part(
                segment="agc-0",
                window="RECV_B",
                expected_s=1.0,
                helps=False,
                compared=frozenset({0} if number == last else ()),
                is_last=number == last,
                in_recompute=False,
            )
            for number, kernel in enumerate(kernels)
        }
        self.checks._planned = Orders(parts=parts)
        self.checks.replays.begin_program(parts)

    def run(self, work: Work, flip: Flip | None = None) -> torch.Tensor:
        """Execute a passage."""
        if flip is not None:
            self.checks.order("f", 0, self._phase, flip)
        with torch.no_grad(), self.checks.over(self._phase, 0, TYPE, 0) as scope:
            scope.enter(self._pass, 0, "layer")
            return work()

    @property
    def kept_bytes(self) -> int:
        return self.checks.waiting.size_bytes

    def replay(self) -> None:
        self.checks.settle([TYPE])
        assert self.kept_bytes == 0
        assert not self.checks.replays._inside
        assert not self.checks.replays._segments


def flip_at(kernel: int, execution: Execution = Execution.PRIMARY) -> Flip:
    return Flip(in_pass=Pass.FORWARD, operator=kernel, element=5, bit=29, execution=execution)


def chain() -> torch.Tensor:
    return X.mm(W).mul(2.0).mm(W)


CHAIN = ["aten.mm", "aten.mul", "aten.mm"]


def test_of_a_segment_its_boundary_alone_is_kept() -> None:
    inside: list[StorageWeakRef] = []

    def work() -> torch.Tensor:
        product = X.mm(W)
        inside.append(StorageWeakRef(product.untyped_storage()))
        return product.mul(2.0).mm(W)

    segment = Kernels(CHAIN)
    output = segment.run(work)

    assert inside[0].expired()
    assert segment.kept_bytes == 2 * SIZE, "the input and the output; parameters are there anyway"
    segment.replay()
    assert segment.found == []
    assert torch.equal(output, chain())


def test_memory_that_a_segment_is_given_is_counted_once() -> None:
    """Both halves of it are written, one at a time, and all of it is read."""

    def work() -> torch.Tensor:
        both = torch.empty(16, 16)
        torch.mul(X[:, :8], 2.0, out=both[:, :8])
        torch.mul(X[:, 8:], 3.0, out=both[:, 8:])
        return both.mm(W)

    segment = Kernels(["aten.mul", "aten.mul", "aten.mm"])
    output = segment.run(work)

    assert segment.kept_bytes == 3 * SIZE, "input, the memory, output"
    segment.replay()
    assert segment.found == []
    assert torch.equal(output, work())


def test_a_product_of_three_axes_stays_inside() -> None:
    """Its kernel has two: the rest is views, one of which does not say so."""
    x = X.view(2, 8, 16)

    def work() -> torch.Tensor:
        return nn.functional.linear(nn.functional.linear(x, W).mul(2.0), W)

    segment = Kernels(CHAIN)
    segment.run(work)

    assert segment.kept_bytes == 2 * SIZE
    segment.replay()
    assert segment.found == []


@pytest.mark.parametrize("kernel", [0, 1, 2])
@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
def test_a_flip_inside_is_found_where_it_leaves(kernel: int, execution: Execution) -> None:
    segment = Kernels(CHAIN)
    segment.run(chain, flip_at(kernel, execution))
    assert segment.found == []

    segment.replay()

    (finding,) = segment.found
    assert (finding.ordinal, finding.operator, finding.block) == (2, "aten.mm", "layer")
    if execution is Execution.PRIMARY:
        assert (finding.verdict, finding.remedy) == (Verdict.PRIMARY_HIT, Remedy.VOID_TYPE)
        assert segment.checks.void == {TYPE}
    else:
        assert (finding.verdict, finding.remedy) == (Verdict.CHECKER_HIT, Remedy.NOTHING)
        assert segment.checks.void == set()


def test_what_another_kernel_reads_is_compared_whatever_the_plan_says() -> None:
    def work() -> torch.Tensor:
        product = X.mm(W)
        hidden = product.mul(0.0).mm(W)
        return hidden + product.exp()

    for flip in (None, flip_at(0)):
        segment = Kernels(CHAIN)
        segment.run(work, flip)
        assert segment.kept_bytes == 3 * SIZE
        segment.replay()
        assert [f.ordinal for f in segment.found] == ([] if flip is None else [0])


def test_what_is_still_there_at_the_replay_is_compared() -> None:
    left: list[torch.Tensor] = []

    def work() -> torch.Tensor:
        left.append(X.mm(W))
        return left[0].mul(0.0).mm(W)

    segment = Kernels(CHAIN)
    segment.run(work, flip_at(0))
    segment.replay()
    assert [finding.ordinal for finding in segment.found] == [0]


@pytest.mark.parametrize("kernel", [None, 0, 1])
def test_what_is_overwritten_before_the_replay_is_copied(kernel: int | None) -> None:
    def work() -> torch.Tensor:
        given = X.clone()
        product = given.mm(W)
        output = product.mul(2.0)
        given.add_(1.0)
        product.sub_(3.0)
        output.neg_()
        return given + product + output

    segment = Kernels(["aten.clone", "aten.mm", "aten.mul"])
    output = segment.run(work, None if kernel is None else flip_at(kernel + 1))
    segment.replay()

    assert len(segment.found) == (kernel is not None)
    if kernel is None:
        assert torch.equal(output, work())


def test_a_segment_beyond_the_budget_is_replayed_so_far_and_the_rest_checked_at_once() -> None:
    def work() -> torch.Tensor:
        product = X.mm(W)
        return product.mul(2.0).mm(torch.ones(16, 16))

    for kernel in range(4):  # the third one is that of the ones
        segment = Kernels([*CHAIN[:2], "aten.ones", "aten.mm"], budget=SIZE + SIZE // 2)
        segment.run(work, flip_at(kernel))
        segment.replay()
        assert len(segment.found) == 1
        assert segment.checks.waiting.most_bytes <= SIZE + SIZE // 2


def test_a_segment_of_a_type_that_does_not_count_is_forgotten() -> None:
    segment = Kernels(CHAIN)
    segment.run(chain, flip_at(1))
    segment.checks.waiting.drop()
    segment.replay()
    assert segment.found == []


def test_a_kernel_that_is_another_one_than_planned_is_checked_at_once() -> None:
    given = X.clone()

    def work() -> torch.Tensor:
        X.mm(W)
        # By its name it is the kernel of the plan. But it reads what it overwrites.
        return torch.mul(given, 2.0, out=given).mm(W)

    segment = Kernels(CHAIN)
    segment.run(work, flip_at(1))
    (finding,) = segment.found
    assert (finding.ordinal, finding.remedy) == (1, Remedy.REPAIR)
    segment.replay()
    assert len(segment.found) == 1


@pytest.mark.parametrize("kernel", [None, 0, 1, 2])
def test_a_product_that_a_gradient_takes_is_compared_by_its_imprint(kernel: int | None) -> None:
    """Its memory holds something else by the time of the replay."""
    scratch = torch.full((3, 16, 16), 7.0)

    def work() -> torch.Tensor:
        torch.mm(X.mul(2.0), W, out=scratch[1])
        torch.mm(X, W, out=scratch[2])
        return scratch[1].clone()

    segment = Kernels(["aten.mul", "aten.mm", "aten.mm"], in_pass=Pass.WEIGHT, phase=Phase.BACKWARD)
    segment.checks.gradient = key_of(scratch)
    flip = None
    if kernel is not None:
        flip = Flip(in_pass=Pass.WEIGHT, operator=kernel, element=5, bit=29)
    segment.run(work, flip)
    assert segment.kept_bytes == SIZE, "the input alone"
    scratch.zero_()
    segment.replay()

    assert not scratch.any(), "the second execution writes elsewhere"
    assert [f.ordinal for f in segment.found] == ([] if kernel is None else [max(1, kernel)])
    assert segment.checks.void == (set() if kernel is None else {TYPE})


@pytest.mark.parametrize("flipped_in", [None, *Execution])
def test_a_product_waits_that_writes_into_a_gradient(flipped_in: Execution | None) -> None:
    found: list[Finding] = []
    checks = Checks(Mode.FULL, tell=found.append, waiting_bytes=1 << 20, plan=PlanName.DYNAMIC)
    checks.begin_program({WHOLE: (TYPE, 0)})
    checks.end_program(completed=True)
    scratch = torch.full((2, 16, 16), 7.0)
    checks.gradient = key_of(scratch)
    if flipped_in in (Execution.PRIMARY, Execution.CHECKER):
        flip = Flip(in_pass=Pass.WEIGHT, operator=0, element=5, bit=29, execution=flipped_in)
        checks.order("f", 0, Phase.BACKWARD, flip)
    with torch.no_grad(), checks.over(Phase.BACKWARD, 0, TYPE, 0) as scope:
        scope.enter(Pass.WEIGHT, 0, "layer")
        torch.mm(X, W, out=scratch[0])
        assert checks.waiting.size_bytes == 2 * SIZE
        scratch[1].add_(X)  # it reads what it writes
    assert len(checks.waiting._waiting) == 1
    scratch.zero_()
    checks.settle([TYPE])

    assert not scratch.any()
    expected = {Execution.PRIMARY: Verdict.PRIMARY_HIT, Execution.CHECKER: Verdict.CHECKER_HIT}
    assert [finding.verdict for finding in found] == [
        expected[flipped_in] for _ in [1] if flipped_in in expected
    ]


def test_places_have_no_part_where_no_plan_names_them() -> None:
    segment = Kernels(CHAIN)
    place = Place(0, Phase.BACKWARD, Pass.FORWARD, TYPE, 0, 0, "layer")
    assert segment.checks.replays.part_of(Spot.of(place, 0, "aten.mm"), place) is None
