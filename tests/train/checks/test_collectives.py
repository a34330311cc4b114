"""Sums over the inner ranks are executed twice, too, and a wrong one is repaired."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.checks.test_replays import CHAIN, TYPE, Kernels, W, X, flip_at
from torch import distributed
from torch.distributed import distributed_c10d

from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode, PlanName
from mainstay_core.dmr.verdicts import Remedy, Verdict
from mainstay_train.checks import collectives, prices
from mainstay_train.checks.checker import Checks
from mainstay_train.checks.places import Phase
from mainstay_train.checks.planned import WHOLE
from mainstay_train.checks.recomputes import ForwardRecord
from mainstay_train.checks.waiting import Waiting
from mainstay_train.comm import mesh
from mainstay_train.comm.interruptible import InterruptibleGroup

NAME = "checks-of-collectives"
ALL_REDUCE = "_c10d_functional.all_reduce"


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """A group of one rank: what another rank adds is nothing, all else is as with several."""
    store = distributed.HashStore()
    group = distributed.ProcessGroup(store, 0, 1)
    kind = distributed.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    gloo = distributed.ProcessGroupGloo(store, 0, 1)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(NAME)
    distributed_c10d._register_process_group(NAME, group)
    yield
    distributed_c10d._unregister_process_group(NAME)


def summed(mode: Mode, *flips: Flip) -> tuple[list[float], list[Finding]]:
    found: list[Finding] = []
    checks = Checks(mode, tell=found.append)
    for flip in flips:
        checks.order("f", 0, Phase.FORWARD, flip)
    with checks.over(Phase.FORWARD) as scope:
        scope.enter(Pass.FORWARD, 0, "layers.0")
        x = torch.ones(3) + 1.0
        result = torch.ops._c10d_functional.all_reduce(x, "sum", NAME)
        total = torch.ops._c10d_functional.wait_tensor(result)
    assert (x == 2).all(), "the operand is left as it is"
    return total.tolist(), found


def flip(**fields: object) -> Flip:
    given: dict[str, object] = {"in_pass": Pass.FORWARD, "operator": ALL_REDUCE}
    return Flip(**(given | {"element": 1, "bit": 31} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [*Mode])
def test_a_clean_sum_is_as_without_checks(mode: Mode) -> None:
    assert summed(mode) == ([2, 2, 2], [])


@pytest.mark.parametrize(
    ("execution", "verdict"),
    [(Execution.PRIMARY, Verdict.PRIMARY_HIT), (Execution.CHECKER, Verdict.CHECKER_HIT)],
)
def test_a_wrong_bit_in_a_sum_is_found_and_repaired(execution: Execution, verdict: Verdict) -> None:
    total, (finding,) = summed(Mode.FULL, flip(execution=execution))

    assert total == [2, 2, 2]
    assert (finding.verdict, finding.operator, finding.block) == (verdict, ALL_REDUCE, "layers.0")
    assert finding.num_elements == 1


def test_without_checks_or_on_a_broken_device_a_sum_is_wrong() -> None:
    wrong = [2, -2, 2]
    sticky = flip(execution=Execution.BOTH, sticky=True)
    assert summed(Mode.OFF, flip()) == (wrong, [])
    assert summed(Mode.FULL, sticky) == (wrong, [])
    total, (finding,) = summed(Mode.FULL, sticky, flip(element=0))
    assert total == wrong
    assert finding.verdict is Verdict.PRIMARY_HIT, "the third one is wrong likewise"


@pytest.mark.parametrize("mode", [*Mode])
def test_who_waits_for_the_cell_in_a_block_that_is_checked_says_so_before(mode: Mode) -> None:
    checks, waits = Checks(mode), list[bool]()
    checks.await_cell = lambda: waits.append(True)
    with checks.over(Phase.FORWARD) as scope:
        scope.enter(Pass.FORWARD, 0, "layers.0")
        torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", NAME)
    assert bool(waits) == (mode is Mode.FULL)


def test_a_flip_without_an_operator_means_a_kernel() -> None:
    total, (finding,) = summed(Mode.FULL, flip(operator=None))
    assert total == [2, 2, 2]
    assert finding.operator != ALL_REDUCE


def recomputed(*flips: Flip) -> tuple[set[int], list[Finding]]:
    """Return which types are void, and what was found, when a forward is executed again."""
    found: list[Finding] = []
    checks, record = Checks(Mode.PIGGYBACK, tell=found.append), ForwardRecord("layers.0")
    for flip in flips:
        checks.order("f", 0, Phase.FORWARD, flip)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        with checks.over(phase, 0, 2, 0) as scope:
            scope.enter(Pass.FORWARD, 0, "layers.0")
            with scope.note(record) if phase is Phase.FORWARD else scope.compare(record):
                result = torch.ops._c10d_functional.all_reduce(torch.ones(3) + 1.0, "sum", NAME)
                torch.ops._c10d_functional.wait_tensor(result).mul(3.0)
    return checks.void, found


def test_what_another_inner_rank_gave_wrong_is_laid_to_no_kernel_of_this_one() -> None:
    assert recomputed() == (set(), [])

    void, (finding,) = recomputed(flip())

    assert void == {2}
    assert (finding.operator, finding.verdict) == (ALL_REDUCE, Verdict.WIRE)
    assert finding.remedy is Remedy.VOID_TYPE


def test_what_this_inner_rank_computes_wrongly_before_a_sum_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is executed twice at once is repaired at once.
    monkeypatch.setattr(prices, "is_pointwise_cheaper", lambda *_: False)
    void, (finding,) = recomputed(flip(operator="aten.add"))

    assert void == {2}
    assert (finding.operator, finding.verdict) == ("aten.add", Verdict.PRIMARY_HIT)


def written_by_others(given: torch.Tensor) -> torch.Tensor:
    """A product whose memory others write, as a sum in place over several ranks does."""
    product = X.mm(W)
    distributed_c10d._resolve_process_group(NAME)._allgather_base(product, given).wait()
    return product.mul(2.0).mm(W)


@pytest.mark.parametrize("plan", [PlanName.DYNAMIC, PlanName.AUTO])
def test_what_a_collective_writes_is_checked_before(plan: PlanName) -> None:
    given = torch.ones(16, 16)
    segment = Kernels(CHAIN if plan is PlanName.AUTO else [], plan=plan)
    output = segment.run(lambda: written_by_others(given))
    assert segment.checks.waiting, "what comes behind it waits"
    segment.replay()

    assert segment.found == []
    assert torch.equal(output, given.mul(2.0).mm(W))


@pytest.mark.parametrize("kind", ["functional", "in place"])
@pytest.mark.parametrize("is_flipped", [False, True])
def test_what_a_collective_reads_is_compared(kind: str, is_flipped: bool) -> None:
    def work() -> torch.Tensor:
        product = X.mm(W)
        hidden = product.mul(0.0).mm(W)
        if kind == "functional":
            result = torch.ops._c10d_functional.all_reduce(product, "sum", NAME)
            total = torch.ops._c10d_functional.wait_tensor(result)
        else:
            total = torch.empty_like(product)
            group = distributed_c10d._resolve_process_group(NAME)
            group._allgather_base(total, product).wait()
        return total + hidden

    segment = Kernels(CHAIN)
    segment.run(work, flip_at(0) if is_flipped else None)
    segment.replay()

    assert [finding.ordinal for finding in segment.found] == [0] * is_flipped
    assert segment.checks.void == ({TYPE} if is_flipped else set())


def connect(store: distributed.Store, rank: int) -> tuple[str, distributed.ProcessGroup]:
    """Connect a rank of a cell of two; return its group, and the name that it has for that."""
    name, kind = f"{NAME}-{rank}", distributed.ProcessGroup.BackendType.GLOO
    group = distributed.ProcessGroup(store, rank, 2)
    group._set_default_backend(kind)
    gloo = distributed.ProcessGroupGloo(store, rank, 2)
    group._register_backend(torch.device("cpu"), kind, gloo)
    of: Any = SimpleNamespace(rank=rank, size=2, ended=None, staged=lambda tensor: tensor)
    of.finish_collective = lambda work, **_: work.wait()
    group = InterruptibleGroup(group, of)
    group._set_group_name(name)
    distributed_c10d._register_process_group(name, group)
    return name, group


@pytest.mark.parametrize("records", [False, True])
def test_while_another_inner_rank_is_waited_for_checks_are_executed(records: bool) -> None:
    """The other one gives nothing before the check of this one has been executed."""
    store, executed, late = distributed.HashStore(), threading.Event(), list[bool]()
    with ThreadPoolExecutor(2) as ranks:
        groups = [*ranks.map(lambda rank: connect(store, rank), range(2))]

        def share(rank: int) -> tuple[list[float], list[Finding]]:
            found: list[Finding] = []
            budget = 0 if rank else 1 << 20
            checks = Checks(Mode.FULL, tell=found.append, waiting_bytes=budget)
            checks.begin_program({WHOLE: (0, 0)})
            if rank:
                late.append(not executed.wait(60.0))
            else:
                checks.waiting.add(Waiting(0, frozenset(), 1, executed.set))
            with torch.no_grad(), checks.over(Phase.FORWARD, 0, 0, 0) as scope:
                scope.enter(Pass.FORWARD, 0, "layers.0")
                with scope.note(ForwardRecord("layers.0")) if records else scope.twice():
                    x = torch.full((3,), rank + 1.0)
                    result = torch.ops._c10d_functional.all_reduce(x, "sum", groups[rank][0])
                    total = torch.ops._c10d_functional.wait_tensor(result)
            assert not checks.waiting
            return total.tolist(), found

        outcomes = [*ranks.map(share, range(2))]
    for name, _ in groups:
        distributed_c10d._unregister_process_group(name)
    assert outcomes == [([3.0] * 3, [])] * 2
    assert late == [False]


@pytest.mark.parametrize(("is_completed", "ended"), [(True, None), (False, "a peer is gone")])
def test_a_collective_that_is_over_or_whose_group_has_ended_is_no_window(
    is_completed: bool, ended: str | None
) -> None:
    of: Any = SimpleNamespace(rank=0, size=1, ended=ended, staged=lambda tensor: tensor)
    begun: Any = SimpleNamespace(is_completed=lambda: is_completed)
    whole: Any = SimpleNamespace(allreduce=lambda _: begun)
    work: Any = InterruptibleGroup(whole, of).allreduce([torch.ones(1)])
    assert work.is_over
    of.ended = None
    assert work.is_over == is_completed


def test_what_a_cell_that_has_ended_leaves_in_memory_accuses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two sums is aborted: it ends without an error, with something else."""
    group, sums = SimpleNamespace(problem=""), [2.0, 2.0, 3.0]
    monkeypatch.setattr(mesh, "_group", group)

    def all_reduce(*args: Any, **kwargs: Any) -> torch.Tensor:
        del args, kwargs
        group.problem = "" if len(sums) == 3 else "a peer is gone"
        return torch.tensor([sums.pop()])

    monkeypatch.setattr(collectives.Call, "_do_some", lambda _, differs, __: differs)
    schema = torch.ops._c10d_functional.all_reduce.default._schema
    all_reduce._schema = schema  # type: ignore[attr-defined]
    told: list[Any] = []
    call = collectives.Call(
        all_reduce, [torch.ones(1), "sum", NAME], {}, lambda result, _: result, mesh.check
    )
    with pytest.raises(RuntimeError, match="a peer is gone"):
        call.check([], lambda **findings: told.append(findings))
    assert not told
