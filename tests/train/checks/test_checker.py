"""Single calls: what is executed again, on which memory, and what comes of three executions."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.train.checks.single import (
    WRITING,
    check_repair,
    count_kernels,
    flip_of,
    halves,
    run,
    tensors,
)

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Judgement, Remedy, Verdict
from mainstay_train.checks import prices
from mainstay_train.checks.checker import UNCHECKED, Checks, UnreliableDeviceError
from mainstay_train.checks.flips import Missed
from mainstay_train.checks.places import Phase, Place
from mainstay_train.exact.draws import generator_of
from mainstay_train.kernels import bits, calls
from mainstay_train.kernels.dispatch import Effects, kernel_of
from mainstay_train.kernels.twins import Overwritten


@pytest.mark.parametrize("execution", [Execution.PRIMARY, Execution.CHECKER])
@pytest.mark.parametrize("name", WRITING)
def test_each_kernel_is_repaired_wherever_it_writes(name: str, execution: Execution) -> None:
    assert check_repair(name, execution).num_elements == 1


def test_views_and_allocations_are_no_kernels() -> None:
    seen = count_kernels(lambda x: torch.empty_like(x).view(2, 8)[1].fill_(1.0).view(2, 4).t())

    assert seen == ["aten.fill_"]


def test_memory_that_a_call_only_takes_is_not_compared() -> None:
    def work(x: torch.Tensor) -> None:
        for _ in range(20):
            x.clone().resize_(40).add_(1.0)  # the next ones get what this one leaves
            torch.empty(0).resize_(40)
            torch.empty(0).set_(x.untyped_storage())

    _, findings = run(lambda: work(halves()))

    assert not findings
    assert count_kernels(work) == ["aten.clone", "aten.add_"] * 20


def test_results_that_attention_does_not_set_are_no_outputs_wherever_others_are_missing() -> None:
    kernel = kernel_of(torch.ops.aten._scaled_dot_product_flash_attention.default)
    query, output, sums, seed = (torch.empty(2) for _ in range(4))
    result = (output, sums, None, None, 8, 8, seed, torch.empty(0), None)

    effects = Effects.of(kernel, [(query, False)], result)

    assert [id(tensor) for tensor in effects.new] == [id(output), id(sums)]


def test_shapes_that_are_asked_for_are_no_kernels_and_parts_of_a_tensor_are_checked() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def imagine() -> torch.Size:
        with FakeTensorMode():  # as DTensor does, to know what a call will give
            return torch.mm(torch.ones(4, 3), torch.ones(3, 2)).shape

    shape, findings = run(imagine)
    assert shape == (4, 2)
    assert not findings

    with single_rank_mesh() as mesh:
        from torch.distributed.tensor import Shard, distribute_tensor

        left = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        product, findings = run(lambda: (left @ left.t()).full_tensor(), flip_of("aten.mm"))
    assert torch.equal(product, torch.full((4, 4), 3.0))
    assert [finding.verdict for finding in findings] == [Verdict.PRIMARY_HIT]


@contextmanager
def single_rank_mesh() -> Iterator[Any]:
    """Yield a device mesh of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def test_a_call_whose_kernels_nobody_sees_is_refused_by_name() -> None:
    x = torch.ones(3)

    with pytest.raises(InvalidSpecError, match=r"dmr\.mode: is Full, but phase reduce calls cond"):
        run(lambda: torch.ops.higher_order.cond(torch.tensor(True), torch.neg, torch.abs, (x,)))


def test_a_finding_whose_kernel_has_a_long_name_can_be_told() -> None:
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append)
    place = Place(0, Phase.FORWARD, Pass.FORWARD, block=0, name="b" * 2000)
    judgement = Judgement(verdict=Verdict.PRIMARY_HIT, remedy=Remedy.REPAIR, reason="")

    checks.tell(
        place, ordinal=1 << 20, operator="o" * 2000, output=1 << 20, num_elements=1,
        judgement=judgement,
    )  # fmt: skip

    assert codec.decode(Finding, codec.encode(findings[0])) == findings[0]


def test_a_twin_lies_as_its_tensor_does() -> None:
    whole = torch.arange(40, dtype=torch.float64)
    written, read = whole[3:19].view(4, 4).t(), whole[17:25]
    overwritten = Overwritten([(written, True), (read, False)], replaces=True)

    twins = overwritten.copy()

    (twin,), other = twins.written, twins.put(read)
    assert overwritten.has_contents  # what is read lies in what is overwritten
    assert twin.stride() == written.stride()
    assert twin.data_ptr() % 64 == written.data_ptr() % 64
    assert twin.data_ptr() != written.data_ptr()
    assert torch.equal(twin, written)
    twin.fill_(-1.0)
    assert other.tolist() == [-1.0, -1.0, *whole[19:25].tolist()]
    assert whole.tolist() == list(range(40))


def test_what_is_only_replaced_is_not_copied() -> None:
    tensor = torch.ones(8)

    assert not Overwritten([(tensor, True), (torch.ones(8), False)], replaces=True).has_contents
    assert Overwritten([(tensor, True)], replaces=False).has_contents


def test_a_kernel_that_adds_to_what_can_only_be_named_reads_that() -> None:
    """Its schema says so: such memory for results comes back as a result."""
    accumulate = torch.ops.mainstay_test.accumulate.default
    replacing = (
        torch.ops.aten.silu_backward.grad_input,
        torch.ops.aten.linalg_svd.U,
        torch.ops.aten._foreach_add.List_out,
    )
    assert all(kernel_of(func).replaces for func in replacing)
    assert not kernel_of(accumulate).replaces
    x, total = torch.ones(1 << 16), torch.zeros(1 << 16)
    for number in range(3):
        _, findings = run(lambda: accumulate(x, total=total))
        assert findings == []
        assert bits.are_equal(total, torch.full_like(total, number + 1.0))


def test_bits_are_compared_as_integers() -> None:
    nan, other = torch.tensor([float("nan")]), torch.tensor([float("nan")])
    assert bits.are_equal(nan, other)
    bits.flip_bit(other, 0, 0)
    assert not bits.are_equal(nan, other)
    assert not bits.are_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    strided = torch.zeros(4, 6)[:, ::2]
    assert bits.are_equal(strided, torch.zeros(4, 3))
    assert not bits.are_equal(torch.zeros(2), torch.zeros(2, 1))
    assert bits.count_differing(torch.zeros(3) * 1j, torch.tensor([0, 1, 1j])) == 2


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8],
)
def test_every_bit_of_every_element_can_be_flipped_and_flipped_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(2, 3).to(dtype).t()
    before = tensor.clone()
    for element in range(6):
        for bit in range(8 * tensor.element_size()):
            assert bits.flip_bit(tensor, element, bit)
            assert bits.count_differing(tensor, before) == 1
            assert bits.flip_bit(tensor, element + 6, bit)
            assert bits.are_equal(tensor, before)
    assert not bits.flip_bit(tensor[:0], 0, 0)


class Worn:
    """A device of which each execution of a product adds another bit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        again, self.times = calls.Call.again, 0

        def wrong(call: Any, twins: Any) -> Any:
            result, made = again(call, twins)
            self.times += 1
            bits.flip_bit(made[0], 0, self.times)
            return result, made

        monkeypatch.setattr(calls.Call, "again", wrong)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("a tensor and a number", 1),
        ("in place with numbers", 0),
        ("in place with numbers", 1),
        ("in place with numbers", 2),
    ],
)
def test_a_number_that_an_operator_tells_beside_a_tensor_is_repaired(
    name: str, output: int
) -> None:
    right, hit = halves(), halves()
    expected = WRITING[name](right)

    result, (finding,) = run(
        lambda: WRITING[name](hit), flip_of(0, output=output, element=1, bit=51)
    )

    assert (finding.output, finding.num_elements) == (output, 1)
    assert finding.remedy is Remedy.REPAIR
    assert bits.are_equal(hit, right)
    for one, other in zip(tensors(result), tensors(expected), strict=True):
        assert bits.are_equal(one, other)


class Slipping:
    """What a user's operator tells, which is wrong the first time."""

    def __init__(self, wrong: Any, right: Any) -> None:
        self.told = [wrong]
        self.right = right

    def __call__(self, x: torch.Tensor) -> Any:
        del x
        return self.told.pop() if self.told else self.right


@pytest.mark.parametrize(
    ("returns", "wrong", "right"),
    [
        ("float", 2.0, 1.0),
        ("float", float("nan"), 0.0),
        ("float", -0.0, 0.0),
        ("int[]", [1, 2], [1, 2, 3]),
        ("str", "a", "b"),
        ("bool", True, False),
    ],
)
def test_what_a_users_operator_tells_is_judged_by_a_third_execution(
    returns: str, wrong: Any, right: Any
) -> None:
    library = torch.library.Library("mainstay_slipping", "FRAGMENT")
    name = library.define(f"tell_{uuid.uuid4().hex}(Tensor x) -> {returns}")
    library.impl(name, Slipping(wrong, right), "CPU")
    operator = getattr(torch.ops.mainstay_slipping, name.rpartition("::")[2])

    result, (finding,) = run(lambda: operator(torch.ones(3)))

    assert repr(result) == repr(right)
    assert (finding.verdict, finding.remedy) == (Verdict.PRIMARY_HIT, Remedy.REPAIR)


def test_an_operator_whose_result_has_no_bits_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpecError, match=r"calls mainstay_test\.parts, which returns some"):
        run(lambda: torch.ops.mainstay_test.parts(torch.ones(3)))


def test_three_results_of_three_executions_end_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    worn = Worn(monkeypatch)
    findings: list[Finding] = []
    checks = Checks(Mode.FULL, tell=findings.append)
    x = torch.ones(2, 2)

    said = r"three executions of aten\.mm \(#0, step of"
    with pytest.raises(UnreliableDeviceError, match=said), checks.over(Phase.REDUCE):
        torch.mm(x, x)

    assert worn.times == 2
    assert [(f.verdict, f.remedy) for f in findings] == [(Verdict.UNRELIABLE, Remedy.HAND_OVER)]
    with pytest.raises(UnreliableDeviceError):  # whichever thread found it
        checks.over(Phase.APPLY)


def test_what_draws_from_a_generator_draws_the_same_again() -> None:
    drawn, findings = run(lambda: torch.rand(5, generator=generator_of("a")))

    assert findings == []
    assert torch.equal(drawn, torch.rand(5, generator=generator_of("a")))


def test_what_draws_from_a_running_generator_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpecError, match=r"detection\.dmr\.mode.*aten\.rand, which draws"):
        run(lambda: torch.rand(5))


def test_without_checks_and_flips_nothing_is_installed() -> None:
    checks = Checks()

    assert checks.over(Phase.FORWARD) is UNCHECKED
    checks.order("flip", 3, Phase.FORWARD, flip_of())
    assert checks.over(Phase.FORWARD) is not UNCHECKED
    checks.begin_step(4)
    assert checks.over(Phase.FORWARD) is UNCHECKED


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("aten.matmul", r"operator aten\.matmul; the nearest names there are aten\.mul"),
        (7, r"operator 7; 2 operators were executed there"),
    ],
)
def test_a_flip_that_finds_no_kernel_names_what_there_is(
    caplog: pytest.LogCaptureFixture, operator: int | str, said: str
) -> None:
    checks = Checks()
    checks.order("f1", 0, Phase.REDUCE, flip_of(operator))
    with checks.over(Phase.REDUCE):
        torch.ones(2).mul(2.0)

    checks.begin_step(1)

    (record,) = caplog.records
    assert record.getMessage().startswith("flip f1 was not put in: the step pass in phase reduce")
    assert caplog.text.count("f1") == 1
    assert re.search(said, record.getMessage())


def forward_of(checks: Checks, block: int) -> None:
    """Execute two kernels of a block, in micro-batch 0 of type 2."""
    with checks.over(Phase.FORWARD, 0, 2, 0) as scope:
        scope.enter(Pass.FORWARD, block, f"layers.{block}")
        torch.ones(2).mul(2.0)


MISSED: dict[str, tuple[dict[str, Any], Phase, str]] = {
    "type": (
        {"in_pass": Pass.FORWARD, "shard_type": 1},
        Phase.FORWARD,
        "no type 1 was executed in the forward pass in phase forward of step 0, only type 2",
    ),
    "micro-batch": (
        {"in_pass": Pass.FORWARD, "shard_type": 2, "micro_batch": 3},
        Phase.FORWARD,
        (
            "no microBatch 3 was executed in the forward pass in phase forward of step 0, only "
            "microBatch 0"
        ),
    ),
    "block": (
        {"in_pass": Pass.FORWARD, "block": 7},
        Phase.FORWARD,
        "no block 7 was executed in the forward pass in phase forward of step 0, only block 0 to 1",
    ),
    "operator": (
        {"in_pass": Pass.FORWARD, "block": 1, "operator": "aten.mu"},
        Phase.FORWARD,
        (
            "the forward pass in phase forward of step 0 of block 1 has no operator aten.mu; the "
            "nearest names there are aten.mul, aten.ones"
        ),
    ),
    "pass": (
        {"in_pass": Pass.WEIGHT},
        Phase.FORWARD,
        "phase forward of step 0 has no weight pass on this rank; it has forward",
    ),
    "phase": (
        {},
        Phase.VOTE,
        "this rank executed nothing in the step pass in phase vote of step 0",
    ),
    "wire": (
        {"where": Where.WIRE},
        Phase.REDUCE,
        "in step 0 nothing came to this rank from other cells",
    ),
    "batch": (
        {"where": Where.BATCH},
        Phase.FORWARD,
        "this rank fetched no batch in step 0",
    ),
}


@pytest.mark.parametrize("name", MISSED)
def test_a_flip_that_was_not_put_in_is_told_with_what_there_is(name: str) -> None:
    fields, phase, why = MISSED[name]
    missed: list[Missed] = []
    checks = Checks(miss=missed.append)
    checks.order("f1", 0, phase, flip_of(**{"operator": None, **fields}))
    for block in range(2):
        forward_of(checks, block)

    checks.begin_step(1)
    checks.begin_step(2)

    assert missed == [Missed("f1", why)]


def test_flips_are_put_in_once_and_only_in_their_step() -> None:
    checks = Checks()
    checks.order("now", 0, Phase.REDUCE, flip_of("aten.ones", bit=0))
    checks.order("later", 1, Phase.REDUCE, flip_of("aten.ones", bit=1))
    with checks.over(Phase.REDUCE):
        first, second = torch.ones(3), torch.ones(3)
    checks.begin_step(1)
    with checks.over(Phase.REDUCE):
        third = torch.ones(3)

    differing = [bits.count_differing(t, torch.ones(3)) for t in (first, second, third)]
    assert differing == [1, 0, 1]


@pytest.mark.parametrize("mode", [*Mode])
def test_a_sparse_tensor_is_refused_by_the_name_of_the_field_and_of_the_block(mode: Mode) -> None:
    dense = torch.eye(3)
    given = dense.to_sparse()
    checks = Checks(mode)
    checks.order("f", 9, Phase.FORWARD, flip_of(0))  # without checks there is a scope, too
    for work in (lambda: torch.sparse.mm(given, dense), dense.to_sparse):
        with checks.over(Phase.FORWARD) as scope:
            scope.enter(Pass.FORWARD, 0, "layers.0")
            if mode is not Mode.FULL:
                assert work().shape == (3, 3)
                continue
            with pytest.raises(
                InvalidSpecError,
                match=r"detection\.dmr\.mode: is Full, but block "
                r"'layers\.0' calls aten\.\w+ with a sparse tensor",
            ):
                work()


def test_answers_by_sizes_are_bounded_and_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose sequences vary in length makes tensors of other sizes in every step."""
    monkeypatch.setattr(prices, "MAX_CHEAP", 8)
    checks, place = Checks(Mode.PIGGYBACK), Place(0, Phase.FORWARD, Pass.STEP, None, None)
    call = cast(calls.Call, SimpleNamespace(kernel=SimpleNamespace(is_pointwise=True), is_far=True))
    several = [[torch.empty(size)] * count for count in (1, 6) for size in range(1, 21)]

    first = [checks.is_cheap(place, call, outputs) for outputs in several]
    assert len(checks._prices._cheap) <= 8
    assert [checks.is_cheap(place, call, outputs) for outputs in several] == first
    assert set(first) == {False, True}
