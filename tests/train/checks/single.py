"""Single calls of kernels under checks, and every way in which a kernel may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.flips import FlipOrders
from mainstay_train.checks.places import Phase, Place
from mainstay_train.kernels import bits


def run(
    work: Callable[[], Any], flip: Flip | None = None, mode: Mode = Mode.FULL
) -> tuple[Any, list[Finding]]:
    """Do some work under checks, with a flip; return what it returns, and the findings."""
    findings: list[Finding] = []
    checks = Checks(mode, tell=findings.append)
    if flip is not None:
        checks.order("flip", 0, Phase.REDUCE, flip)
    with checks.over(Phase.REDUCE), torch.no_grad():
        result = work()
    return result, findings


def flip_of(operator: int | str | None = None, **fields: Any) -> Flip:
    given = {"in_pass": Pass.STEP, "operator": operator, "element": 1, "bit": 4}
    return Flip(**(given | fields))


def halves() -> torch.Tensor:
    """Columns of a larger tensor: strides, gaps, and no round address."""
    return torch.arange(60, dtype=torch.float32).view(6, 10)[1:5, 3:7]


def _accumulate(x: torch.Tensor, *, total: torch.Tensor) -> None:
    total.add_(x)


LIBRARY = torch.library.Library("mainstay_test", "DEF")
LIBRARY.define("halves(Tensor x) -> Tensor[]")
# They share one memory, as what attention's backward returns may do.
LIBRARY.impl("halves", lambda x: [*(x * 2.0).chunk(2)], "CPU")
# What they tell is computed of elements, beside what they return and write.
LIBRARY.define("largest(Tensor x) -> float")
LIBRARY.impl("largest", lambda x: float(x.abs().max()), "CPU")
LIBRARY.define("scaled(Tensor x) -> (Tensor, float)")
LIBRARY.impl("scaled", lambda x: (x * 2.0, float(x.abs().max())), "CPU")
LIBRARY.define("counts(Tensor x) -> int[]")
LIBRARY.impl("counts", lambda x: [int((x > 20).sum()), int(x.numel())], "CPU")
LIBRARY.define("halve_all(Tensor(a!) x) -> (float, bool)")
LIBRARY.impl("halve_all", lambda x: (float(x.mul_(0.5).sum()), True), "CPU")
LIBRARY.define("parts(Tensor x) -> Dict(str, Tensor)")
LIBRARY.impl("parts", lambda x: {"all": x * 2.0}, "CPU")
LIBRARY.define("accumulate(Tensor x, *, Tensor(a!) total) -> ()")
# It reads what can only be named, and writes it.
LIBRARY.impl("accumulate", _accumulate, "CPU")


WRITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "add in place": lambda x: x.add_(1.5),
    "with itself": lambda x: x.add_(x.t().contiguous().t()),
    "out": lambda x: torch.mul(x.clone(), 3.0, out=x),
    "out is an operand": lambda x: torch.add(x, x.clone(), out=x),
    "memory for a gradient": lambda x: torch.ops.aten.silu_backward.grad_input(
        x.clone(), x.t().clone(), grad_input=x
    ),
    "adds to what is named": lambda x: torch.ops.mainstay_test.accumulate(x.clone(), total=x),
    "copy": lambda x: x.copy_(x.clone() * 2),
    "zero": lambda x: x.zero_(),
    "rows": lambda x: x.index_add_(0, torch.tensor([1, 1, 3]), torch.ones(3, 4)),
    "several": lambda x: torch._foreach_add_([x[:2], x[2:]], 2.0),
    "made": lambda x: torch.mm(x, x.t()),
    "sorted": lambda x: torch.sort(x, dim=1, descending=True),
    "halves": lambda x: torch.ops.mainstay_test.halves(x),
    "number": lambda x: x.sum().item(),
    "a user's number": lambda x: torch.ops.mainstay_test.largest(x),
    "a tensor and a number": lambda x: torch.ops.mainstay_test.scaled(x),
    "several numbers": lambda x: torch.ops.mainstay_test.counts(x),
    "in place with numbers": lambda x: torch.ops.mainstay_test.halve_all(x),
    "complex": lambda x: torch.view_as_complex(x.clone().view(4, 2, 2)) * 1j,
}


TELLING = frozenset(
    {
        "a tensor and a number",
        "a user's number",
        "in place with numbers",
        "number",
        "several numbers",
    }
)
"""Those of them that tell the host a number."""


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, float | int):
        return [torch.tensor(value, dtype=torch.float64)]
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [tensor for each in value for tensor in tensors(each)]


def count_kernels(work: Callable[[torch.Tensor], Any]) -> list[str]:
    """Names of the kernels that some work calls."""
    seen: list[str] = []

    class Spy(FlipOrders):
        is_empty = False  # so that it is asked about each kernel

        def take(
            self, place: Place, ordinal: int | None, kernel: str, where: Where = Where.COMPUTE
        ) -> list[Flip]:
            del place, ordinal, where
            seen.append(kernel)
            return []

    checks = Checks(Mode.FULL)
    checks.take_orders(Spy())
    given = halves()
    with checks.over(Phase.REDUCE):
        work(given)
    return seen


def check_repair(name: str, execution: Execution) -> Finding:
    """Execute a kernel of :data:`WRITING` with a wrong bit in one execution; return the finding.

    What it leaves is what it leaves without one.
    """
    work = WRITING[name]
    whole, right = halves(), halves()
    expected = work(right)
    last = len(count_kernels(work)) - 1

    result, (finding,) = run(lambda: work(whole), flip_of(last, execution=execution))

    wrong = execution is Execution.PRIMARY
    assert finding.verdict is (Verdict.PRIMARY_HIT if wrong else Verdict.CHECKER_HIT)
    assert finding.remedy is (Remedy.REPAIR if wrong else Remedy.NOTHING)
    assert bits.are_equal(whole._base, right._base)
    for one, other in zip(tensors(result), tensors(expected), strict=True):
        assert bits.are_equal(one, other)
    return finding
