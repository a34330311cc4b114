"""Batches are fetched twice: a wrong one is not computed, and a data set that draws is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.train.checks.step import Step

from mainstay_core.dmr.flips import Execution, Flip, Where
from mainstay_core.dmr.operators import Pass
from mainstay_core.dmr.settings import Mode
from mainstay_core.dmr.verdicts import Verdict
from mainstay_train.base import device as devices
from mainstay_train.checks.places import Phase
from mainstay_train.compute.batches import BATCH
from mainstay_train.compute.engine import Engine
from mainstay_train.compute.loader import Loader, Wanted
from mainstay_train.exact.draws import Address
from mainstay_train.model.data import Batch
from mainstay_train.model.workload import WorkloadError

WANTED = Wanted(Address(1, 0, 0, 0), True)


class Flaky:
    """A data set some of whose fetches have a wrong token, and no two the same one."""

    def __init__(self, dataset: Any, *wrong: int) -> None:
        self._dataset, self._wrong, self.calls = dataset, wrong, 0

    def batch(self, address: Address) -> Batch:
        batch = self._dataset.batch(address)
        tokens = batch.tokens.clone()
        if self.calls in self._wrong:
            tokens[0, 3] ^= 1 + self.calls
        self.calls += 1
        return Batch(tokens, batch.targets)


class Rows:
    def batch(self, address: Address) -> Batch:
        del address
        return Batch(torch.arange(6).view(1, 6), torch.arange(6).view(1, 6))


@pytest.mark.parametrize(
    ("wrong", "verdict", "calls"),
    [((), None, 2), ((0,), Verdict.PRIMARY_HIT, 3), ((1,), Verdict.CHECKER_HIT, 3)],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_batch_of_which_two_fetches_were_equal_is_taken(
    wrong: tuple[int, ...], verdict: Verdict | None, calls: int, ahead: bool
) -> None:
    flaky = Flaky(Rows(), *wrong)

    loaded = Loader(flaky, ahead=ahead, twice=True).take(WANTED)

    assert loaded.batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert loaded.consumed == Loader(Rows(), ahead=False).take(WANTED).consumed
    assert (loaded.judgement and loaded.judgement.verdict) == verdict
    assert loaded.num_differing == (verdict is not None)
    assert flaky.calls == calls


class Reusing(Flaky):
    """A data set that gives its one buffer each time."""

    buffer: Batch | None = None

    def batch(self, address: Address) -> Batch:
        batch = super().batch(address)
        if self.buffer is None:
            self.buffer = Batch(batch.tokens.clone(), batch.targets.clone())
        self.buffer.tokens.copy_(batch.tokens)
        self.buffer.targets.copy_(batch.targets)
        return self.buffer


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [((), None), ((0,), Verdict.PRIMARY_HIT), ((1,), Verdict.CHECKER_HIT)],
)
def test_a_second_fetch_into_the_same_memory_is_compared_with_the_first(
    wrong: tuple[int, ...], verdict: Verdict | None
) -> None:
    loaded = Loader(Reusing(Rows(), *wrong), ahead=False, twice=True).take(WANTED)

    assert loaded.batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert (loaded.judgement and loaded.judgement.verdict) == verdict


def test_a_data_set_that_gives_its_one_buffer_has_no_device_accused_by_checks_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step("llama", recompute=False, micro_batches=1, waiting_bytes=1 << 30)
    clean = step.run(Mode.OFF)
    (engine,) = step._engines[Mode.FULL]
    assert engine.interpreter is not None
    loader = Loader(Reusing(step._workload.dataset), ahead=False, twice=True)
    engine.interpreter._batches._loader = loader
    compute, computed = step._compute, []

    def compute_once(engines: list[Engine]) -> None:
        computed.append(engines)
        assert len(computed) == 1, "no type is void"
        compute(engines)

    monkeypatch.setattr(step, "_compute", compute_once)

    ended = step.run(Mode.FULL)

    assert ended.findings == []
    assert ended.num_refused == 0
    assert ended.digests == clean.digests
    assert engine.checks.waiting.most_bytes > 0


def test_one_buffer_for_all_batches_is_as_good_as_one_for_each_in_every_mode() -> None:
    """Two micro-batches are under way at a time; their backwards and recomputes read them."""
    step = Step("llama", recompute=True, stages=2)
    clean = step.run(Mode.OFF)
    for mode in Mode:
        for engine in step._engines[mode]:
            assert engine.interpreter is not None
            reusing = Reusing(step._workload.dataset)
            loader = Loader(reusing, ahead=False, twice=mode is Mode.FULL)
            engine.interpreter._batches._loader = loader

        ended = step.run(mode)

        assert (ended.digests, ended.findings, ended.num_refused) == (clean.digests, [], 0), mode


@pytest.mark.parametrize("twice", [False, True])
def test_a_copy_of_a_batch_lies_in_memory_as_the_batch_does(twice: bool) -> None:
    """A kernel may choose its code by strides and alignment: else bits would depend on checks."""
    rows = torch.arange(60).view(6, 10)
    given = Batch(rows[1:5, 3:7], rows.t()[2:4])

    class Views:
        def batch(self, address: Address) -> Batch:
            del address
            return given

    batch = Loader(Views(), ahead=False, twice=twice).take(WANTED).batch

    pairs = [(batch.tokens, given.tokens), (batch.targets, given.targets)]
    for copy, own in pairs:
        assert torch.equal(copy, own)
        assert copy.stride() == own.stride()
        assert (copy.data_ptr() - own.data_ptr()) % 64 == 0
        assert copy.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()


@pytest.mark.parametrize("twice", [False, True])
def test_a_copy_of_a_batch_does_not_have_what_lies_between_its_numbers(twice: bool) -> None:
    """A data set may keep the n-th token of all samples together, or lie in a file as a whole."""
    tokens = torch.arange(16 * 100_000, dtype=torch.int32).view(16, -1)
    given = Batch(tokens[:, 5:9].t(), tokens[::4, :8].expand(3, -1, -1))

    class Columns:
        def batch(self, address: Address) -> Batch:
            del address
            return given

    batch = Loader(Columns(), ahead=False, twice=twice).take(WANTED).batch

    for copy, own in ((batch.tokens, given.tokens), (batch.targets, given.targets)):
        assert torch.equal(copy, own)
        assert copy.untyped_storage().nbytes() == own.numel() * own.element_size()


@pytest.mark.parametrize("twice", [False, True])
def test_a_batch_is_page_locked_without_what_lies_between_and_though_it_is_expanded(
    monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    """Memory is locked from a tensor's first number to its last, and copied to with its strides."""
    tokens = torch.arange(16 * 100_000, dtype=torch.int32).view(16, -1)
    given = Batch(tokens[:, 5:9].t(), torch.arange(6).expand(4, 6))
    sizes: list[int] = []

    def lock(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        del device
        place = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        sizes.append(place.untyped_storage().nbytes())
        return place.copy_(tensor)

    class Columns:
        def batch(self, address: Address) -> Batch:
            del address
            return given

    monkeypatch.setattr(devices, "page_locked", lock)
    batch = Loader(Columns(), ahead=False, twice=twice).take(WANTED).batch

    for locked, own in ((batch.tokens, given.tokens), (batch.targets, given.targets)):
        assert torch.equal(locked, own)
    assert max(sizes) <= 4 * 16 * 8


def test_a_batch_in_memory_that_is_page_locked_already_is_copied_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To lock it again gives the data set's own memory back."""
    locked: list[torch.Tensor] = []

    def lock(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        del device
        locked.append(tensor)
        return tensor

    monkeypatch.setattr(devices, "page_locked", lock)
    reusing = Reusing(Rows())
    batch = Loader(reusing, ahead=False).take(WANTED).batch

    assert reusing.buffer is not None
    assert batch.tokens.data_ptr() != reusing.buffer.tokens.data_ptr()
    assert any(tensor is batch.tokens for tensor in locked), "a device copies from there by itself"


def test_a_data_set_that_gives_three_batches_is_the_users_mistake() -> None:
    flaky = Flaky(Rows(), 0, 1)

    with pytest.raises(WorkloadError, match=r"three different batches for micro-batch 0 of type 0"):
        Loader(flaky, ahead=False, twice=True).take(WANTED)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("execution", [*Execution])
def test_a_flip_in_a_fetch_is_found_unless_both_fetches_have_it(
    execution: Execution, output: int, ahead: bool
) -> None:
    flip = Flip(
        in_pass=Pass.STEP,
        where=Where.BATCH,
        output=output,
        element=3,
        bit=1,
        execution=execution,
    )
    clean = Loader(Rows(), ahead=False).take(WANTED)
    wanted = replace(WANTED, flips=(flip,))

    plain = Loader(Rows(), ahead=ahead).take(wanted)
    checked = Loader(Rows(), ahead=ahead, twice=True)
    checked.order(WANTED)  # it is fetched before the fault fires
    loaded = checked.take(wanted)

    parts = [loaded.batch.tokens, loaded.batch.targets]
    right = [clean.batch.tokens, clean.batch.targets]
    is_equal = all(torch.equal(*pair) for pair in zip(parts, right, strict=True))
    verdicts = {
        Execution.PRIMARY: Verdict.PRIMARY_HIT,
        Execution.CHECKER: Verdict.CHECKER_HIT,
        Execution.BOTH: None,
    }
    assert (loaded.judgement and loaded.judgement.verdict) == verdicts[execution]
    assert is_equal == (execution is not Execution.BOTH)
    assert (plain.consumed == clean.consumed) == (execution is Execution.CHECKER)


def test_a_flip_in_the_first_fetch_of_a_step_changes_no_digest_with_checks() -> None:
    step = Step("llama", recompute=False)
    clean = step.run(Mode.OFF)
    flip = Flip(in_pass=Pass.STEP, where=Where.BATCH, micro_batch=1, element=3, bit=0)
    ended = {}
    for mode in Mode:
        (engine,) = step._engines[mode]
        engine.checks.order("f", 0, Phase.FORWARD, flip)
        ended[mode] = step.run(mode)
        assert engine.checks._orders.is_empty

    assert ended[Mode.OFF].digests != clean.digests
    assert ended[Mode.FULL].digests == clean.digests
    (finding,) = ended[Mode.FULL].findings
    assert (finding.operator, finding.shard_type, finding.micro_batch) == (BATCH, 0, 1)


def test_a_wrong_batch_is_told_like_any_finding() -> None:
    step = Step("llama", recompute=False)
    clean = step.run(Mode.OFF)
    (engine,) = step._engines[Mode.FULL]
    assert engine.interpreter is not None
    flaky = Flaky(step._workload.dataset, 2)  # the first fetch of the second batch
    engine.interpreter._batches._loader = Loader(flaky, ahead=False, twice=True)

    ended = step.run(Mode.FULL)

    assert ended.digests == clean.digests
    (finding,) = ended.findings
    assert (finding.operator, finding.in_pass) == (BATCH, Pass.STEP)
    assert (finding.shard_type, finding.micro_batch) == (0, 1)
    assert finding.verdict is Verdict.PRIMARY_HIT
