"""A loop of the user's own whose data cannot be read in one step: it fails there each time."""

import torch
from torch import nn

import mainstay_train

FAILS_AT = 2
TEXT = "the shard is not there\nlook at the mount"


def read(number: int) -> torch.Tensor:
    """Return a step's data."""
    if number == FAILS_AT:
        raise OSError(TEXT)
    return torch.ones(2, 3)


@mainstay_train.loop
def train(session: mainstay_train.LoopSession) -> None:
    """Train until the data cannot be read."""
    model = nn.Linear(3, 1)
    session.register(model, learning_rate=0.1)
    for step in session.steps():
        for work in step.work():
            work.sample_ids(1, 10)
            loss = model(read(step.number).to(session.device)).sum()
            loss.backward()
            work.done(loss, tokens=2)
        step.commit()
