"""A user's workload for tests: gated like ``gated_llama``, and the trainers of some pods come late.

The first argument is the directory of the gates, the second the pods (numbers, comma-separated)
whose trainers wait for the file ``late`` there before they say hello; steps with a gate follow.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstay_train.model.workload import Workload, load

POLL_S = 0.01


def workload(config: Mapping[str, Any], args: Sequence[str]) -> Workload:
    directory, late, *steps = args
    # A trainer's output goes to its pod's directory, NAME-NUMBER-RANDOM.
    number = Path(os.readlink("/proc/self/fd/1")).parent.name.split("-")[-2]
    if number in late.split(","):
        while not (Path(directory) / "late").exists():
            time.sleep(POLL_S)
    gated = Path(__file__).with_name("gated_llama.py")
    return load(f"{gated}:workload", dict(config), (directory, *steps))
