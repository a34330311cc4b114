"""Fused optimizers are executed piece by piece, with the bits and the names of one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.train.checks.single import flip_of, run
from tests.train.checks.step import Step

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks import by_piece
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.exact.eager_optimizers import EagerAdamW, EagerSGD
from mainstay_train.kernels import bits, calls
from mainstay_train.kernels.dispatch import kernel_of

PIECE = 1 << 10
SIZES = ((3, 1711), (5,), (1,), (2, PIECE), (0,), (4097,))
"""Several pieces, none, whole ones, and ends that fill no vector."""

Factory = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
KINDS: dict[str, Factory] = {
    "adamw": partial(EagerAdamW, lr=0.01, fused=True, weight_decay=0.1),
    "amsgrad": partial(EagerAdamW, lr=0.01, fused=True, amsgrad=True),
    "sgd": partial(EagerSGD, lr=0.01, fused=True, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_piece, "PIECE_ELEMENTS", PIECE)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call that was asked for was cut."""
    found: list[bool] = []
    pieces_of = by_piece.pieces_of

    def noting(*given: Any) -> Any:
        pieces = pieces_of(*given)
        found.append(pieces is not None)
        return pieces

    monkeypatch.setattr(by_piece, "pieces_of", noting)
    return found


class Trained:
    """Parameters with gradients, and their optimizer after its first step."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [torch.randn(size, generator=generator) for size in SIZES]
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer = KINDS[kind](self.parameters)
        self.optimizer.step()

    def state(self) -> list[torch.Tensor]:
        kept = [t for p in self.parameters for t in self.optimizer.state[p].values()]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return [*self.parameters, *gradients, *(t for t in kept if isinstance(t, torch.Tensor))]


def assert_alike(one: Trained, other: Trained) -> None:
    for first, second in zip(one.state(), other.state(), strict=True):
        assert bits.are_equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_bits_of_one_call(kind: str, cut: list[bool]) -> None:
    plain, checked = Trained(kind), Trained(kind)
    for _ in range(3):
        plain.optimizer.step()
        _, findings = run(checked.optimizer.step)
        assert findings == []
    assert_alike(plain, checked)
    assert sum(cut) == 3


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
@pytest.mark.parametrize("output", [0, 3, 6, 12 + 5, 18 + 3])
def test_a_flip_names_what_the_whole_call_writes(
    output: int, execution: Execution, cut: list[bool]
) -> None:
    """Of six parameters: their number, then those of their gradients and both moments."""
    plain, checked = Trained("adamw"), Trained("adamw")
    plain.optimizer.step()
    elements = plain.parameters[output % 6].numel()
    flip = flip_of(
        "aten._fused_adamw_", output=output, element=elements - 1, bit=21, execution=execution
    )

    _, (finding,) = run(checked.optimizer.step, flip)

    assert_alike(plain, checked)
    wrong = execution is Execution.PRIMARY
    assert finding.verdict is (Verdict.PRIMARY_HIT if wrong else Verdict.CHECKER_HIT)
    assert finding.remedy is (Remedy.REPAIR if wrong else Remedy.NOTHING)
    assert (finding.operator, finding.output) == ("aten._fused_adamw_", output)
    assert finding.num_elements == 1
    assert sum(cut) == 1


def wrong_at(numbers: tuple[int, ...]) -> Callable[..., Any]:
    """Return what executes again, and has two elements wrong in executions of such numbers."""
    count = iter(range(1 << 20))
    again = calls.Call.again

    def wrong(call: calls.Call, *given: Any) -> Any:
        result, outputs = again(call, *given)
        if call.kernel.name in by_piece.CUT and next(count) in numbers:
            bits.flip_bit(outputs[0], 1, 20)
            bits.flip_bit(outputs[0], 0, 20)
        return result, outputs

    return wrong


def test_pieces_that_are_judged_alike_are_one_finding(
    cut: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third execution follows each wrong one, so the first three pieces and the fifth are."""
    plain, checked = Trained("adamw"), Trained("adamw")
    plain.optimizer.step()
    monkeypatch.setattr(calls.Call, "again", wrong_at((0, 2, 4, 7)))

    _, (finding,) = run(checked.optimizer.step)

    assert_alike(plain, checked)
    assert (finding.verdict, finding.num_elements) == (Verdict.CHECKER_HIT, 8)
    assert (finding.operator, finding.output) == ("aten._fused_adamw_", 0)
    assert sum(cut) == 1


def test_pieces_that_are_judged_otherwise_are_findings_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two executions of the second piece are wrong, each otherwise: that ends the trainer."""
    checked = Trained("adamw")
    monkeypatch.setattr(calls.Call, "again", wrong_at((0, 2)))
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append)
    checks.order(
        "flip", 0, Phase.REDUCE, flip_of("aten._fused_adamw_", output=0, element=PIECE + 3, bit=9)
    )

    with (
        pytest.raises(calls.UnreliableDeviceError),
        checks.over(Phase.REDUCE),
        torch.no_grad(),
    ):
        checked.optimizer.step()

    verdicts = [finding.verdict for finding in findings]
    assert verdicts == [Verdict.CHECKER_HIT, Verdict.UNRELIABLE]


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
def test_a_step_whose_optimizer_goes_by_pieces_ends_as_one_without_checks(
    execution: Execution, cut: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_piece, "PIECE_ELEMENTS", 64)
    step = Step("llama", recompute=False, micro_batches=1)
    clean = step.run(Mode.OFF)
    spots = [s for s in step.list(Mode.FULL) if s.kernel == "aten._fused_adamw_"]
    assert step.run(Mode.FULL).digests == clean.digests
    flip = spots[2].flip(output=1, element=70, bit=25, execution=execution)

    ended = step.run(Mode.FULL, flip, spots[2])

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.operator, finding.ordinal) == ("aten._fused_adamw_", spots[2].ordinal)
    assert finding.output == 1
    assert finding.block == spots[2].place.name
    assert sum(cut) >= len(spots), "in each step with checks"


def test_lists_of_other_sizes_and_gaps_are_not_cut() -> None:
    kernel = kernel_of(torch.ops.aten._fused_adamw_.default)
    large, gaps = torch.zeros(3 * PIECE), torch.zeros(3 * PIECE, 2)[:, 0]
    assert by_piece.pieces_of(kernel, [[large], [large], []], {}) is not None
    for lists in ([[large], [large[1:]]], [[gaps], [gaps]], [[large], [large, large]]):
        assert by_piece.pieces_of(kernel, lists, {}) is None
    assert by_piece.pieces_of(kernel, [[large[:PIECE]]], {}) is None, "it is small"
    other = kernel_of(torch.ops.aten._foreach_add_.Scalar)
    assert by_piece.pieces_of(other, [[large], 1.0], {}) is None
