"""Training loops as users write them, right ones and wrong ones: entrypoints of the tests."""

import torch
from torch import nn
from torch.nn import functional

import mainstay_train
from mainstay_train.exact import optimizer
from mainstay_train.model import data

WIDTH = 16


class Model(nn.Module):
    """Tied twice, drawn from the global generator, with a buffer: what plain modules do."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.ReLU())
        self.register_buffer("scale", torch.tensor(2.0))
        self.bias = nn.Parameter(torch.zeros(256))
        self.to(dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.layers(x) * self.scale
        return x @ self.embedding.weight.t() + self.bias


def loss_of(model, work):
    logits = model(work.inputs)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), work.targets.flatten(), reduction="sum"
    )


def register(session, model=None, **options):
    model = model if model is not None else Model()
    options = {
        "learning_rate": 1e-2,
        "data": data.ByteDataset(sequence=8, micro_batch_size=2),
    } | options
    session.register(model, **options)
    return model


def go_through(session, model):
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=work.targets.numel())
        step.commit()


@mainstay_train.loop
def train(session):
    go_through(session, register(session))


@mainstay_train.loop
def train_in_bf16(session):
    """Also with another optimizer and data that it reads itself."""
    model = Model(torch.bfloat16)
    sgd = optimizer.each(torch.optim.SGD, momentum=0.9)
    register(session, model, optimizer=sgd, data=None, clip_norm=None, fingerprint={"data": "x"})
    for step in session.steps():
        for work in step.work():
            ids = torch.tensor(work.sample_ids(4, population=256))
            noise = torch.randint(0, 256, (4,), generator=work.generator("noise"))
            loss = functional.cross_entropy(model(ids).float(), noise, reduction="sum")
            loss.backward()
            work.done(loss, tokens=4)
        step.commit()


@mainstay_train.loop
def mistaken(session):
    MISTAKES[session.config["mistake"]](session)


def commits_early(session):
    model = register(session)
    for step in session.steps():
        work = next(step.work())
        loss = loss_of(model, work)
        loss.backward()
        work.done(loss, tokens=16)
        step.commit()


def skips_done(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss_of(model, work).backward()
        step.commit()


def skips_backward(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            work.done(loss_of(model, work), tokens=16)


def skips_commit(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=16)


def goes_back_twice(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            loss_of(model, work).backward()
            work.done(loss, tokens=16)


def goes_back_twice_through_one_graph(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            loss.backward()
            work.done(loss, tokens=16)


def is_done_twice(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=16)
            work.done(loss, tokens=16)


def works_after_commit(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=16)
        step.commit()
        for work in step.work():
            loss_of(model, work).backward()


def commits_twice(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=16)
        step.commit()
        step.commit()


def leaves_early(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=16)
        step.commit()
        break


def never_begins(session):
    register(session)


def registers_nothing(session):
    next(session.steps())


def registers_twice(session):
    register(session)
    register(session)


def uses_half_of_the_model(session):
    model = Model()
    model.extra = nn.Linear(2, 2)
    go_through(session, register(session, model))


def steps_an_optimizer(session):
    model = register(session)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            own.step()
            work.done(loss, tokens=16)


def keeps_statistics(session):
    register(session, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def takes_no_mean(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = model(work.inputs).sum(dim=0)
            loss.sum().backward()
            work.done(loss, tokens=16)


def has_no_data(session):
    model = register(session, data=None)
    go_through(session, model)


def counts_in_fractions(session):
    model = register(session)
    for step in session.steps():
        for work in step.work():
            loss = loss_of(model, work)
            loss.backward()
            work.done(loss, tokens=0.5)


def has_an_optimizer_that_cannot_be_healed(session):
    go_through(session, register(session, optimizer=optimizer.each(torch.optim.LBFGS)))


def raises(session):
    register(session)
    raise ValueError("the user's own words")


def has_a_typing_error(session):
    register(session)
    seesion.steps()  # noqa: F821


MISTAKES = {
    function.__name__: function
    for function in list(globals().values())
    if getattr(function, "__module__", "") == __name__ and callable(function)
}
