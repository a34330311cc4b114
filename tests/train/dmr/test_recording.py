"""A recorded passage: the same bits, a graph that tells what is read, and operators that repeat."""

from __future__ import annotations

from ctypes import string_at
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from mainstay_core.base.shape import Cut
from mainstay_core.dmr.operators import Origin, Pass
from mainstay_core.dmr.static import plan_checks
from mainstay_train.dmr import passage as passages
from mainstay_train.dmr.passage import StagePasses
from mainstay_train.dmr.profiler import WAITS, fullest_of, make_profile, plan_windows
from mainstay_train.dmr.recorder import Call, Passage, Recorder
from mainstay_train.dmr.timers import ClockTimer
from mainstay_train.exact import numerics
from mainstay_train.kernels.dispatch import key_of
from mainstay_train.kernels.regions import Region
from mainstay_train.model import workload as workloads

LLAMA = "mainstay_train.models.llama:workload"
MOE = "mainstay_train.models.moe:workload"
SMALL = {"dim": 16, "layers": 1, "heads": 2, "kvHeads": 1, "hidden": 24, "sequence": 12}
EXPERTS = {
    "denseLayers": 0,
    "experts": 4,
    "activeExperts": 2,
    "sharedExperts": 1,
    "expertHidden": 8,
}
NARROW = SMALL | {"dtype": "bfloat16"}


def build(
    entrypoint: str, config: dict[str, Any], *, recompute: float, stage: int = 0, stages: int = 1
) -> StagePasses:
    numerics.setup("cpu")
    passes = StagePasses(
        workloads.load(entrypoint, config),
        stage=stage,
        num_stages=stages,
        cut=Cut.BALANCED,
        seed=3,
        recompute=recompute,
        device=torch.device("cpu"),
    )
    passes.run(0)
    return passes


def ticking() -> ClockTimer:
    """A clock by which each call takes a second."""
    ticks = count()
    return ClockTimer(lambda: float(next(ticks)))


def record(passes: StagePasses, step: int) -> Passage:
    passage = passes.run(step, ticking())[1]
    assert passage is not None
    return passage


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bits(tensor: torch.Tensor) -> bytes:
    packed = tensor.detach().resolve_conj().contiguous()
    return string_at(packed.data_ptr(), packed.numel() * packed.element_size())


def bytes_at(tensor: torch.Tensor, region: Region) -> bytes:
    first = tensor.untyped_storage().data_ptr() + region.start
    return b"".join(string_at(first + i * region.period, region.run) for i in range(region.count))


class CheckingRecorder(Recorder):
    """Executes each call again at once, and follows the bytes behind each name."""

    replayed = 0
    values: dict[str, bytes]

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.values = getattr(self, "values", {})
        again_args, again_kwargs = tree_map(self._copy, (args, kwargs))
        for tensor in tensors((args, kwargs)):
            for content in self._contents.covered(tensor):
                now = bytes_at(tensor, content.region)
                assert self.values.setdefault(content.name, now) == now, content.name
        result = super()._run(func, args, kwargs)
        again = func(*again_args, **again_kwargs)
        if "empty" not in str(func):
            pairs = zip(tensors(result), tensors(again), strict=True)
            assert all(bits(first) == bits(second) for first, second in pairs), func
            self.replayed += 1
        return result

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> str | None:
        name = super().see(func, args, kwargs, result)
        for tensor in tensors((args, kwargs, result)):
            if self._contents.knows(tensor):
                for content in self._contents.covered(tensor):
                    now = bytes_at(tensor, content.region)
                    assert self.values.setdefault(content.name, now) == now, content.name
        return name

    def _copy(self, leaf: Any) -> Any:
        """A copy that has the layout of what is read, and shares no memory with it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        memory = leaf.untyped_storage().clone()
        copy = torch.empty(0, dtype=leaf.dtype)
        copy.set_(memory, leaf.storage_offset(), leaf.size(), leaf.stride())
        return copy.conj() if leaf.is_conj() else copy


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("entrypoint", "config"), [(LLAMA, SMALL), (LLAMA, NARROW), (MOE, SMALL | EXPERTS)]
)
def test_recording_moves_no_bit_and_operators_repeat_from_their_inputs(
    monkeypatch: pytest.MonkeyPatch, entrypoint: str, config: dict[str, Any], recompute: bool
) -> None:
    passes = build(entrypoint, config, recompute=recompute)
    plain, _ = passes.run(1)
    made: list[CheckingRecorder] = []

    def checking(timer: ClockTimer) -> CheckingRecorder:
        made.append(CheckingRecorder(timer))
        return made[0]

    monkeypatch.setattr(passages, "Recorder", checking)
    seen, passage = passes.run(1, ticking())

    assert passage is not None
    assert bits(seen.gradients) == bits(plain.gradients)
    assert isinstance(plain.result.loss_sum, torch.Tensor)
    assert isinstance(seen.result.loss_sum, torch.Tensor)
    assert bits(seen.result.loss_sum) == bits(plain.result.loss_sum)
    assert made[0].replayed > len(passage.calls) > 50
    assert bool(passage.recomputed) == recompute


def test_of_a_share_of_the_blocks_the_recompute_is_recorded() -> None:
    passes = build(LLAMA, SMALL, recompute=0.5)
    _, passage = passes.run(0, ticking())
    assert passage is not None
    again = {call.block for call in passage.calls if call.id in passage.recomputed}
    assert again == {0, 1}, "the first two of four"


@pytest.mark.parametrize("beyond", [None, "", "0/forward/0"])
def test_a_recompute_that_calls_more_than_its_forward_is_compared_with_nothing(
    beyond: str | None,
) -> None:
    calls = [
        Call(
            block=0,
            in_pass=in_pass,
            ordinal=ordinal,
            name="aten.mm",
            inputs=(),
            outputs=(f"y{timed}",),
            overwrites=(),
            shapes=(),
            timed=timed,
        )
        for timed, (in_pass, ordinal) in enumerate(
            [(Pass.FORWARD, 0), (Pass.FORWARD, 1), (Pass.BACKWARD, 0)]
        )
    ]
    names = [call.id for call in calls if call.in_pass is Pass.FORWARD]
    passage = Passage(
        blocks={0: "layers.0"},
        calls=calls,
        seconds=[1.0] * 3,
        tensors=dict.fromkeys(("y0", "y1", "y2"), (4, Origin.MADE)),
        recomputed=set(names),
        again={0: [*names, *([] if beyond is None else [beyond])]},
    )

    profile = make_profile([passage], fingerprint="f", stage=0, budget_bytes=0)

    assert len(profile.ac_segments) == (beyond is None)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_profile_of_a_middle_stage_tells_what_enters_and_what_leaves(recompute: bool) -> None:
    passes = build(LLAMA, SMALL, recompute=recompute, stage=1, stages=3)
    recorded = [record(passes, step) for step in range(2)]

    windows = plan_windows(
        recorded[0],
        stage=1,
        num_stages=3,
        num_passages=2,
        replicas=2,
        lengths=dict.fromkeys(WAITS, (3.0, 3.0)),
        headroom_bytes=1 << 20,
    )
    profile = make_profile(
        recorded, fingerprint="f", stage=1, budget_bytes=1 << 20, windows=windows
    )

    origins = {tensor.name: tensor.origin for tensor in profile.tensors}
    gradients = [name for name in profile.results if "/weight/" in name]
    last_forward = [o.in_pass for o in profile.operators].index(Pass.BACKWARD)
    assert origins["received activation"] is Origin.RECEIVED
    assert origins["received gradient"] is Origin.RECEIVED
    assert origins["layers.0.attention_qkv.weight"] is Origin.ADDRESSED
    assert len(gradients) == 6  # of a layer: two norms, four products
    assert all(operator.static and operator.median_s == 1.0 for operator in profile.operators)
    assert [(w.name, w.after) for w in windows] == [
        ("RECV_B", last_forward),
        ("RECV_F", len(profile.operators)),
    ]
    assert len(profile.ac_segments) == int(recompute)
    assert plan_checks(profile).totals.operator_s == len(profile.operators)


def test_experts_have_no_fixed_shapes_and_what_the_host_reads_is_compared() -> None:
    passes = build(MOE, SMALL | EXPERTS, recompute=True)
    recorded = [record(passes, step) for step in range(3)]

    profile = make_profile(recorded, fingerprint="f", stage=0, budget_bytes=0)

    dynamic = [operator for operator in profile.operators if not operator.static]
    at = fullest_of(recorded)
    sizes = {call.id: call.shapes for call in at.calls}
    varying = {
        call.id
        for one in recorded
        for call in one.calls
        if call.id in sizes and sizes[call.id] != call.shapes
    }
    products = [o for o in dynamic if o.name == "aten.mm" and o.in_pass is Pass.FORWARD]
    assert varying <= {operator.id for operator in dynamic}
    assert {operator.block for operator in dynamic} == {1}  # the layer
    assert len(products) >= 2 * EXPERTS["experts"]
    assert len(dynamic) < len(profile.operators) / 2
    counts = [o for o in profile.operators if o.name == "aten.diff" or "sub" in o.name]
    assert {name for o in counts for name in o.outputs} & set(profile.results)


def test_what_draws_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"block 'layers\.0' calls aten\.rand, which draws"):
        record(build(LLAMA, SMALL | {"dropout": 0.1}, recompute=False), 0)


def test_regions_tell_interleaved_columns_apart_and_never_miss_a_shared_byte() -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    views = [
        whole,
        whole[1:3],
        whole[:, :2],
        whole[:, 2:],
        whole[:, :, 1],
        whole[:, :, 2:4],
        whole.transpose(0, 2)[1:2],
        whole[2, 3],
        whole[::2, ::3],
        whole[:0],
    ]
    left, right = Region.of(whole[:, :2]), Region.of(whole[:, 2:])
    assert left is not None
    assert right is not None
    assert not left.overlaps(right)
    for one in views:
        for other in views:
            here, there = Region.of(one), Region.of(other)
            shared = set(one.reshape(-1).tolist()) & set(other.reshape(-1).tolist())
            if shared:
                assert here is not None
                assert there is not None
                assert here.overlaps(there)
            if here is not None and there is not None and here.contains(there):
                assert set(other.reshape(-1).tolist()) <= shared


def test_memory_is_known_by_its_identity() -> None:
    tensor = torch.zeros(4)

    assert key_of(tensor) == key_of(tensor[1:].detach())
    assert key_of(tensor) != key_of(tensor.clone())
