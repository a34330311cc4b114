"""The built-in mixture of experts: against all experts computed for all tokens under autograd."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact import draws, numerics
from mainstay_train.model import blocks, workload
from mainstay_train.models import experts, moe
from mainstay_train.models.llama_config import parse_config
from mainstay_train.models.moe_config import MoeConfig

MOE = "mainstay_train.models.moe:workload"
ADDRESS = draws.Address(1, 2, 3, 0)
SMALL = {
    "dim": 24, "layers": 3, "heads": 4, "kvHeads": 2, "hidden": 40, "sequence": 10,
    "microBatchSize": 2, "experts": 6, "activeExperts": 3, "sharedExperts": 2, "expertHidden": 12,
}  # fmt: skip
FORMS = [
    {"router": router, "gates": gates, "balanceLoss": loss, "balanceWeight": 0.3, "gateScale": 2.5}
    for router, gates, loss in itertools.product(
        ("softmax", "sigmoid"), ("normalized", "plain"), ("none", "sequence")
    )
]


@pytest.fixture(scope="module", autouse=True)
def _arithmetic():
    numerics.setup("cpu")


def _config(**changes):
    return parse_config({**SMALL, **changes}, MoeConfig)


def _mixture_block(dtype=torch.float32, **changes):
    """The last layer, with first values under which routing is uneven."""
    (spec,) = moe.block_specs(_config(**changes))[-2:-1]
    block = blocks.Block(spec, dtype=dtype)
    block.initialize(5)
    block.masters.mul_(8)
    block.refresh()
    return block


def _x(dtype=torch.float32, requires_grad=False):
    x = torch.randn(2, 10, 24, generator=ADDRESS.generator("x"))
    return x.to(dtype).requires_grad_(requires_grad)


def _dense(module, x, config):
    """Output and balance loss of a mixture in fp64: every expert takes every token."""
    flat = x.flatten(0, 1)
    logits = flat @ module.router.weight.T
    scores = torch.softmax(logits, 1) if config.router == "softmax" else torch.sigmoid(logits)
    wanted = scores if module.router.bias is None else scores + module.router.bias
    order = sorted(
        ((token, expert) for token in range(len(flat)) for expert in range(config.experts)),
        key=lambda pair: (pair[0], -wanted[pair].item(), pair[1]),
    )
    taken = torch.zeros_like(scores)
    for token in range(len(flat)):
        for pair in order[token * config.experts :][: config.active_experts]:
            taken[pair] = 1
    gates = scores * taken
    if config.gates == "normalized":
        gates = gates / gates.sum(1, keepdim=True)
    output = sum(
        config.gate_scale * gates[:, i : i + 1] * _swiglu(expert, flat)
        for i, expert in enumerate(module.experts)
    )
    output = output + _swiglu(module.shared, flat)
    length = config.sequence
    shares = (scores / scores.sum(1, keepdim=True)).view(len(x), length, -1).mean(1)
    load = taken.view(len(x), length, -1).sum(1) * config.experts
    load = load / (config.active_experts * length)
    balance = config.balance_weight * length * (load * shares).sum()
    return output.view(x.shape), balance * (config.balance_loss == "sequence")


def _swiglu(expert, x):
    gate, up = (x @ expert.gate_up.weight.T).chunk(2, -1)
    return (functional.silu(gate) * up) @ expert.down.weight.T


class _Alone(nn.Module):
    """A mixture as a block of its own."""

    def __init__(self, config):
        super().__init__()
        self.mixture = experts.Mixture(config)

    def forward(self, x):
        return self.mixture(x)


def _alone(config):
    (layer,) = moe.block_specs(config)[-2:-1]
    return blocks.BlockSpec(
        name="block",
        build=lambda: _Alone(config),
        statistics=layer.statistics,
        committed=layer.committed,
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_equal_those_of_all_experts_under_autograd(form):
    config = _config(**form)
    block = blocks.Block(_alone(config))
    block.initialize(5)
    block.masters.mul_(8)
    bias = block.layout.views(block.masters)["block.mixture.router.bias"]
    bias.normal_(std=0.2, generator=ADDRESS.generator("bias"))
    x, dy = _x(), torch.randn(2, 10, 24, generator=ADDRESS.generator("dy"))
    tape = block.recompute(x, ADDRESS)
    output = tape.output.detach()
    assert torch.equal(output, block.forward(x, ADDRESS))
    dx = block.backward_input(tape, dy)
    views = block.layout.views(torch.full((block.layout.size,), float("nan")))
    block.backward_weight(tape, views)

    module = copy.deepcopy(block.module.mixture).double().requires_grad_(True)
    leaf = x.double().requires_grad_()
    wanted, balance = _dense(module, leaf, config)
    (wanted * dy.double()).sum().add(balance).backward()
    torch.testing.assert_close(output.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=1e-3, atol=1e-4)
    found = {name.removeprefix("block.mixture."): view for name, view in views.items()}
    assert found.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-3, atol=1e-4)
    assert views["block.mixture.router.weight"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_repeats_its_bits(dtype):
    block = _mixture_block(dtype, dropout=0.2)
    x = _x(dtype)
    y = block.forward(x, ADDRESS)
    tapes = [block.recompute(x.clone(), ADDRESS) for _ in range(2)]
    assert all(torch.equal(tape.output, y) for tape in tapes)
    found = [block.backward_input(tape, torch.cos(y)) for tape in tapes]
    assert torch.equal(*found)
    flats = [torch.zeros(block.layout.size) for _ in range(2)]
    for tape, flat in zip(tapes, flats, strict=True):
        block.backward_weight(tape, block.layout.views(flat))
    assert torch.equal(*flats)
    assert flats[0].any()


def test_in_bfloat16_a_mixture_takes_the_same_experts_and_is_near_fp32():
    spec = _alone(_config())
    narrow, wide = (blocks.Block(spec, dtype=d) for d in (torch.bfloat16, torch.float32))
    narrow.initialize(5)
    narrow.masters.mul_(8)
    narrow.refresh()
    wide.masters.copy_(narrow.compute)
    x, found = _x(torch.bfloat16), []
    for block, given in ((narrow, x), (wide, x.float())):
        tape = block.recompute(given, ADDRESS)
        output = tape.output.detach().float()
        dx = block.backward_input(tape, torch.ones_like(given)).float()
        views = block.layout.views(torch.zeros(block.layout.size))
        block.backward_weight(tape, views)
        found.append([output, dx, *views.values()])
    for one, other in zip(*found, strict=True):
        near = 0.03 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0.03, atol=near)


def test_the_whole_model_is_a_llama_with_experts_behind_its_dense_layers():
    model = workload.load(MOE, SMALL)
    names = [spec.name for spec in model.blocks]
    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    routed = [any("router" in p.name for p in flat.params) for flat in model.layouts()]
    assert routed == [False, False, True, True, False]
    llama = workload.load("", {k: v for k, v in SMALL.items() if "xpert" not in k})
    assert model.layouts()[1] == llama.layouts()[1]
    assert model.blocks[1].cost == llama.blocks[1].cost


def test_equal_scores_go_to_the_lower_expert():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert experts.choose(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert experts.choose(scores, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]
    random = torch.Generator().manual_seed(1)
    for _ in range(200):
        width = int(torch.randint(1, 12, (1,), generator=random))
        active = int(torch.randint(1, width + 1, (1,), generator=random))
        scores = torch.randint(0, 4, (5, width), generator=random).float()
        brute = [
            sorted(sorted(range(width), key=lambda e: (-row[e], e))[:active])
            for row in scores.tolist()
        ]
        assert experts.choose(scores, active).tolist() == brute


def test_tokens_reach_an_expert_in_their_order_and_come_back_in_that_of_experts():
    random = torch.Generator().manual_seed(2)
    for _ in range(100):
        tokens, width = torch.randint(1, 9, (2,), generator=random).tolist()
        active = int(torch.randint(1, width + 1, (1,), generator=random))
        chosen = experts.choose(torch.rand(tokens, width, generator=random), active)
        way = experts.Way.of(chosen, width)
        brute = [
            (expert, token)
            for expert in range(width)
            for token in range(tokens)
            if expert in chosen[token].tolist()
        ]
        assert way.tokens.tolist() == [token for _, token in brute]
        assert way.counts.tolist() == [
            sum(e == expert for e, _ in brute) for expert in range(width)
        ]
        wanted = [[brute.index((e, t)) for e in chosen[t].tolist()] for t in range(tokens)]
        assert way.rows.tolist() == wanted
        assert experts.counts_of(chosen, 1, width)[0].tolist() == way.counts.tolist()


def test_what_a_token_s_experts_return_is_added_by_ascending_expert():
    # With these numbers every other order of the sum has other bits.
    outputs = torch.tensor([[1e8], [1.0], [-1e8], [3.0]])
    chosen = torch.tensor([[0, 1, 2, 3]])
    way = experts.Way.of(chosen, 4)
    (total,) = experts._Combine.apply(outputs, torch.ones(1, 4), way)
    assert total.item() == ((1e8 + 0.0) - 1e8) + 3.0
    x = torch.zeros(1, 1, requires_grad=True)
    experts._Dispatch.apply(x, way).backward(outputs)
    assert x.grad.item() == 3.0


def test_an_expert_without_tokens_has_a_zero_gradient():
    block = _mixture_block(router="softmax")
    views = block.layout.views(torch.full((block.layout.size,), float("nan")))
    router = block.layout.views(block.masters)["layers.2.mixture.router.weight"]
    router.zero_()  # equal scores: the first three experts take all tokens
    tape = block.recompute(_x(), ADDRESS)
    block.backward_input(tape, torch.ones(2, 10, 24))
    block.backward_weight(tape, views)
    used = [views[f"layers.2.mixture.experts.{e}.down.weight"].any() for e in range(6)]
    assert used == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activeExperts": 7}, r"config.activeExperts: must be at most experts \(6\), got 7"),
        ({"experts": 0}, r"config.experts: must be above 0, got 0"),
        ({"router": "tanh"}, r"config.router: must be one of sigmoid, softmax, got 'tanh'"),
        ({"balanceLoss": "batch"}, r"config.balanceLoss: must be sequence or none, as a loss over"),
        ({"balanceLoss": "z"}, r"config.balanceLoss: must be one of none, sequence, got 'z'"),
        ({"denseLayers": 3}, r"config.denseLayers: must be below layers \(3\)"),
        ({"activeExperts": 1}, r"config.gates: must be plain where activeExperts is 1"),
        ({"gateScale": 0}, r"config.gateScale: must be above 0, got 0.0"),
        ({"balanceWeight": -1}, r"config.balanceWeight: must not be negative"),
        ({"sharedExperts": True}, r"config.sharedExperts: must be of type int, got True"),
        ({"expert": 3}, r"config.expert: is unknown; did you mean 'experts'\?"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_its_field(changes, message):
    with pytest.raises(InvalidSpecError, match=message):
        workload.load(MOE, {**SMALL, **changes})


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_shares_of_the_scores_are_counted_token_by_token_if_that_is_wanted(router):
    block = _mixture_block(router=router, counts="probabilities")
    plain = _mixture_block(router=router)

    told = block.recompute(_x(), ADDRESS).statistics.tolist()
    tokens, probabilities = told[:6], told[6:]
    assert tokens == plain.recompute(_x(), ADDRESS).statistics.tolist()
    assert [*block.spec.statistics[6:8]] == ["experts.0.probability", "experts.1.probability"]
    # 20 tokens, whose shares add up to 1 but for what is rounded.
    assert abs(sum(probabilities) - 20 * 65_536) <= 20 * 6 / 2
    assert torch.equal(block.recompute(_x(), ADDRESS).output, plain.recompute(_x(), ADDRESS).output)
