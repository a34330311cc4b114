import logging

import pytest
import torch
from torch import nn

from mainstay_train.exact import optimizer
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model.plain_model import PlainModel
from mainstay_train.model.workload import WorkloadError
from mainstay_train.session.driver import GlobalGenerators

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(3, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.head(x)


def gradients_of(model, adopted, x, grads, *, accumulate):
    adopted.begin(lambda: None)
    adopted.module(x).sum().backward()
    for name, gradient in adopted.collect("a test").items():
        if gradient is None:
            gradient = torch.zeros_like(grads[name])
        grads[name].copy_(grads[name] + gradient if accumulate else gradient)


def test_parameters_stay_themselves_and_move_into_flat_buffers():
    module = Small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    objects = {name: id(p) for name, p in module.named_parameters()}
    model = PlainModel(module, CPU)
    assert {name: id(p) for name, p in module.named_parameters()} == objects
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
    assert [part.name for part in model.parts] == ["<model>", "layers.0.0", "layers.1.0", "head"]
    (head,) = (part for part in model.parts if part.name == "head")
    head.masters.fill_(7.0)
    assert bool((module.head.weight == 7).all())
    assert bool((module.head.bias != 7).any())


def test_a_step_and_the_way_back_to_the_first_values():
    torch.manual_seed(1)
    module = Small()
    first = {name: p.detach().clone() for name, p in module.named_parameters()}
    model = PlainModel(module, CPU)
    state = StageState(model.parts, optimizer.adamw())
    flat = state.layout.allocate()
    x = torch.rand(4, 3)
    gradients_of(module, model, x, state.layout.views(flat), accumulate=False)
    state.apply(state.layout.block_views(flat), 1.0, 0.1)
    assert not torch.equal(module.head.weight, first["head.weight"])
    state.initialize(99)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, first[name])
    gradients_of(module, model, x, state.layout.views(flat), accumulate=False)  # no rule is broken


def test_micro_batches_add_up_in_fp32_in_their_order():
    torch.manual_seed(2)
    module = Small().to(torch.bfloat16)
    model = PlainModel(module, CPU)
    state = StageState(model.parts, optimizer.adamw())
    flat = state.layout.allocate()
    views = state.layout.views(flat)
    batches = [torch.rand(4, 3).to(torch.bfloat16) for _ in range(3)]
    expected = {name: torch.zeros_like(view) for name, view in views.items()}
    for number, x in enumerate(batches):
        gradients_of(module, model, x, views, accumulate=number > 0)
        module(x).sum().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad.float()
                parameter.grad = None
    for name, view in views.items():
        assert torch.equal(view, expected[name])


def test_gradients_are_handed_on_without_a_copy():
    module = Small().to(torch.bfloat16)
    model = PlainModel(module, CPU)
    model.begin(lambda: None)
    module(torch.rand(4, 3).to(torch.bfloat16)).sum().backward()
    given = {name: p.grad.data_ptr() for name, p in module.named_parameters() if p.requires_grad}

    found = model.collect("a test")

    assert {name: gradient.data_ptr() for name, gradient in found.items()} == given
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}


def test_an_unused_parameter_is_zero_where_it_is_allowed():
    module = Small()
    module.extra = nn.Linear(2, 2)
    model = PlainModel(module, CPU, allow_unused=True)
    state = StageState(model.parts, optimizer.adamw())
    flat = state.layout.allocate().fill_(5.0)
    views = state.layout.views(flat)
    gradients_of(module, model, torch.rand(1, 3), views, accumulate=False)
    assert not views["extra.weight"].any()
    assert views["head.weight"].any()


def test_the_fingerprint_names_first_values_shapes_and_what_is_fixed():
    def entries(change=nn.Module.train):
        torch.manual_seed(3)
        module = Small()
        change(module)
        return PlainModel(module, CPU).fingerprint()

    def differing(change):
        return [n for n, text in entries(change).items() if text != entries()[n]]

    assert entries() == entries()
    assert differing(lambda m: m.scale.data.fill_(2.0)) == ["model.first_values"]
    assert differing(lambda m: m.head.bias.data.fill_(2.0)) == ["model.fixed"]
    assert "model" in differing(lambda m: m.register_parameter("p", nn.Parameter(torch.ones(1))))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (3, "takes a torch.nn.Module, got int"),
        (nn.Tanh(), "no parameter that is trained"),
        (nn.Linear(2, 2, dtype=torch.float16), "of one type out of float32, bfloat16, found .*16"),
        (nn.Linear(2, 2, device="meta"), "'weight' and 1 more is on the meta device"),
    ],
)
def test_what_cannot_be_adopted_is_refused(module, message):
    with pytest.raises(WorkloadError, match=message):
        PlainModel(module, CPU)


def test_a_sparse_gradient_is_refused():
    module = nn.Embedding(4, 2, sparse=True)
    model = PlainModel(module, CPU)
    model.begin(lambda: None)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(WorkloadError, match="'weight' has a sparse gradient"):
        model.collect("a test")


def test_a_changed_buffer_is_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    model = PlainModel(module, CPU)
    module.train()
    model.begin(lambda: None)
    module(torch.rand(4, 2)).sum().backward()
    with pytest.raises(WorkloadError, match=r"'1\.num_batches_tracked' was changed .* a test"):
        model.collect("a test")


def test_global_generators_draw_by_address_and_tell_once_of_draws_between(caplog):
    generators = GlobalGenerators()
    dropout = nn.Dropout(0.5)
    drawn = []
    with caplog.at_level(logging.WARNING):
        for address in (1, 2, 1):
            generators.set(address, "global")
            drawn.append(dropout(torch.ones(64)))
            generators.leave()
        assert not caplog.records
        for _ in range(2):
            torch.rand(1)
            generators.set(4)
            generators.leave()
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert len(caplog.records) == 1
