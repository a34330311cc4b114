"""Works that are computed twice: what comes to the loop, what is compared, and what counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.quorum import make_config
from torch import nn

from mainstay_core.base.errors import InvalidSpecError
from mainstay_core.base.shape import Order
from mainstay_core.dmr.findings import Finding
from mainstay_core.dmr.flips import Execution, Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_train.checks.checker import Checks, UnreliableDeviceError
from mainstay_train.checks.places import Phase
from mainstay_train.compute import purity
from mainstay_train.exact import numerics
from mainstay_train.exact import optimizer as optimizers
from mainstay_train.kernels import bits
from mainstay_train.model import data
from mainstay_train.model.plain_model import PlainModel
from mainstay_train.model.workload import WorkloadError
from mainstay_train.session.driver import GlobalGenerators, LoopTraining, check_job
from mainstay_train.session.loop import Step
from mainstay_train.session.work import WORK, Work

CPU = torch.device("cpu")
TYPES = (0, 1)
DATA = data.ByteDataset(sequence=4, micro_batch_size=2)
Compute = Callable[[nn.Module, Work], torch.Tensor]


class Model(nn.Module):
    """Draws from the global generator, and has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 4)
        self.out = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.embedding(tokens)).square().sum()
        return y


def plainly(model: nn.Module, work: Work) -> torch.Tensor:
    loss: torch.Tensor = model(work.inputs)
    return loss


class Loop:
    """One step of a user's loop, without the session around it."""

    def __init__(self, mode: Mode, dtype: torch.dtype = torch.float32) -> None:
        numerics.setup("cpu")
        torch.manual_seed(5)
        self.findings: list[Finding] = []
        self.checks = Checks(mode, tell=self.findings.append)
        self.came: list[tuple[int, int, bool]] = []
        self.completed: list[int] = []
        """Types of which the session was told, when their gradient was held."""
        config = replace(make_config(stages=1, lanes=2), dmr=mode)
        self.module = Model().to(dtype)
        training = LoopTraining(
            config=config,
            model=PlainModel(self.module, CPU, allow_unused=True),
            optimizer=optimizers.adamw(),
            schedule=lambda _: 0.1,
            clip_norm=1.0,
        )
        engine = training.build_engine(0, 1, 0, lambda _: None, self.checks)
        self.driver: Any = SimpleNamespace(
            training=training,
            engine=engine,
            device=CPU,
            config=config,
            generators=GlobalGenerators(),
            completed=self.completed.append,
        )

    def run(self, compute: Compute = plainly) -> tuple[str, ...]:
        """Compute all types; return digests of what the vote would tell."""
        step = Step(self.driver, DATA, 0, TYPES)
        for work in step.work():
            self.came.append((work.address.type, work.address.micro_batch, work.again))
            loss = compute(self.module, work)
            loss.backward()  # type: ignore[no-untyped-call]
            work.done(loss, tokens=8)
        assert not step._left
        assert self.completed == [*TYPES]
        engine = self.driver.engine
        told = [
            repr((r.loss_sum, r.tokens, r.data))
            for r in (engine.type_results[shard_type] for shard_type in TYPES)
        ]
        return (bits.digest_of([*engine.store.partials.values()]), *told)


@pytest.fixture(scope="module")
def clean() -> tuple[str, ...]:
    return Loop(Mode.OFF).run()


def flip(**fields: Any) -> Flip:
    given = {"in_pass": Pass.WEIGHT, "operator": WORK, "element": 3, "bit": 30}
    return Flip(**(given | {"micro_batch": 1} | fields))


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.FULL])
def test_a_work_whose_gradient_is_added_keeps_none_of_it(mode: Mode) -> None:
    kept: list[Work] = []

    def compute(model: nn.Module, work: Work) -> torch.Tensor:
        kept.append(work)
        return plainly(model, work)

    loop = Loop(mode)
    loop.run(compute)

    assert kept
    for work in kept:
        assert work._outcome is not None
        assert not work._outcome.gradients, "a model's gradients would stay until the next work"
        with pytest.raises(WorkloadError, match="not at hand"):
            work.done(0.0, tokens=1)


def test_each_work_comes_twice_and_no_bit_is_another_one(clean: tuple[str, ...]) -> None:
    loop = Loop(Mode.FULL)

    assert loop.run() == clean

    assert loop.findings == []
    places = [(t, m) for t in TYPES for m in range(2)]
    assert loop.came == [(*place, again) for place in places for again in (False, True)]


@pytest.mark.parametrize(
    ("execution", "verdict"),
    [(Execution.PRIMARY, Verdict.PRIMARY_HIT), (Execution.CHECKER, Verdict.CHECKER_HIT)],
)
def test_a_wrong_gradient_is_found_and_the_right_one_counts(
    clean: tuple[str, ...], execution: Execution, verdict: Verdict
) -> None:
    loop = Loop(Mode.FULL)
    loop.checks.order("f", 0, Phase.BACKWARD, flip(execution=execution, output=1))

    assert loop.run() == clean

    (finding,) = loop.findings
    assert (finding.operator, finding.verdict, finding.output) == (WORK, verdict, 1)
    assert (finding.shard_type, finding.micro_batch, finding.num_elements) == (0, 1, 1)
    assert loop.came[2:5] == [(0, 1, False), (0, 1, True), (0, 1, True)]


@pytest.mark.parametrize("bit", [0, 40])
def test_a_wrong_fetch_of_a_batch_is_found_before_the_loop_sees_it(
    clean: tuple[str, ...], bit: int
) -> None:
    """A token that does not exist would end the loop."""
    loop = Loop(Mode.FULL)
    wrong = flip(where=Where.BATCH, in_pass=Pass.STEP, operator=None, bit=bit)
    loop.checks.order("f", 0, Phase.FORWARD, wrong)

    assert loop.run() == clean
    (finding,) = loop.findings
    assert (finding.operator, finding.verdict) == ("batch", Verdict.PRIMARY_HIT)
    assert (finding.shard_type, finding.micro_batch, finding.num_elements) == (0, 1, 1)


def test_sums_of_a_loop_are_checked_by_operators(clean: tuple[str, ...]) -> None:
    loop = Loop(Mode.FULL)
    of_sum = Flip(in_pass=Pass.STEP, operator="aten.add_", element=1, bit=30)
    loop.checks.order("f", 0, Phase.BACKWARD, of_sum)

    assert loop.run() == clean
    assert [finding.operator for finding in loop.findings] == ["aten.add_"]


@pytest.mark.parametrize("sticky", [False, True])
def test_without_checks_or_from_a_broken_device_the_gradient_is_wrong(
    clean: tuple[str, ...], sticky: bool
) -> None:
    wrong = flip(execution=Execution.BOTH, sticky=sticky)
    ended = []
    for mode in Mode:
        loop = Loop(mode)
        loop.checks.order("f", 0, Phase.BACKWARD, wrong)
        ended.append(loop.run())
        assert loop.findings == []
    assert len(set(ended)) == 1
    assert ended[0] != clean


def drawing(model: nn.Module, work: Work) -> torch.Tensor:
    return plainly(model, work) * torch.rand((), generator=OTHER)


OTHER = torch.Generator()


def test_a_loop_that_is_no_function_of_its_work_is_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = r"type 0, micro-batch 0 gave three different gradients or losses"
    with pytest.raises(WorkloadError, match=said):
        Loop(Mode.FULL).run(drawing)
    monkeypatch.setattr(purity, "computes_the_same", lambda _: False)
    loop = Loop(Mode.FULL)
    with pytest.raises(UnreliableDeviceError):
        loop.run(drawing)
    assert [finding.verdict for finding in loop.findings] == [Verdict.UNRELIABLE]


def test_a_work_that_was_left_between_its_two_executions_comes_again(
    clean: tuple[str, ...],
) -> None:
    loop = Loop(Mode.FULL)
    step = Step(loop.driver, DATA, 0, TYPES)
    for work in step.work():
        loss = plainly(loop.module, work)
        loss.backward()  # type: ignore[no-untyped-call]
        work.done(loss, tokens=8)
        break
    with pytest.raises(WorkloadError, match="commit of step 0 with 4 micro-batches left"):
        step.commit()
    assert loop.run() == clean


def test_a_mode_that_knows_passes_is_refused_by_its_field() -> None:
    check_job(replace(make_config(stages=1), dmr=Mode.FULL))
    config: Any = SimpleNamespace(
        **{
            name: getattr(make_config(stages=1), name)
            for name in ("shape", "recompute", "snapshots")
        }
    )
    config.dmr = SimpleNamespace(value="Piggyback")
    with pytest.raises(InvalidSpecError, match=r"detection\.dmr\.mode: is Piggyback, but the pass"):
        check_job(config)


def test_an_order_of_stages_is_refused_before_their_number() -> None:
    config = make_config(stages=2, order=Order.SWAPPED)
    with pytest.raises(InvalidSpecError, match=r"pipeline\.order: is Swapped, but an own loop"):
        check_job(config)
