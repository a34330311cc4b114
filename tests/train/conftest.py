from mainstay_train.base import environment

environment.prepare()  # before anything imports torch: tests compute as trainers do

import pytest  # noqa: E402
import torch  # noqa: E402
from tests.train.crew import Crew  # noqa: E402

torch.set_num_threads(1)  # forked children must not find a thread pool without its threads


@pytest.fixture
def crew():
    workers = Crew()
    yield workers
    workers.end()
