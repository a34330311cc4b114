"""A user's workload for tests: a built-in model whose data of some steps waits for a file.

A run is held before a chosen step until the test has seen what it waits for (a place
taken again, a process to kill), so no test depends on how fast this machine is. The
numbers are the built-in model's: a gate only delays.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstay_train.exact import draws
from mainstay_train.model import data
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama, moe

POLL_S = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class GatedDataset:
    inner: data.Dataset
    directory: Path
    steps: frozenset[int]

    def batch(self, address: draws.Address) -> data.Batch:
        if address.step in self.steps:
            # That somebody stands here must be seen without asking the api.
            with contextlib.suppress(FileNotFoundError):
                (self.directory / f"at-{address.step}").touch()
            while not (self.directory / str(address.step)).exists():
                time.sleep(POLL_S)
        return self.inner.batch(address)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    """Arguments: the directory of the gates, and the steps that have one.

    The model is the Llama, or the mixture of experts where the configuration names experts.
    """
    directory, *steps = args
    built_in = (moe if "experts" in config else llama).workload(config)
    gates = GatedDataset(built_in.dataset, Path(directory), frozenset(map(int, steps)))
    # Loaded ahead, a batch of the next step would stand at its gate before this step is computed.
    return dataclasses.replace(built_in, dataset=gates, load_ahead=False)
