from mainstay_train.base import environment

environment.prepare()  # before anything imports torch: tests compute as trainers do

import pytest  # noqa: E402
import torch  # noqa: E402
from tests.train.crew import Crew, Nursery  # noqa: E402

from mainstay_train.sums import compiled  # noqa: E402

torch.set_num_threads(1)  # as in a trainer


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as started:
        yield started


@pytest.fixture
def crew(nursery):
    workers = Crew(nursery)
    yield workers
    workers.end()


@pytest.fixture(params=["compiled", "torch"])
def form(request, monkeypatch):
    """The form of digests and norms: compiled code, or batches of torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "load", lambda: None)
    else:
        pytest.importorskip("llvmlite")
    return request.param
