"""Prints the digests of a job's steps with stages lost, all stages in one process.

    python -m tests.e2e.staged_twin JOB.yaml '[[8, 1]]'

The second argument has (steps trained, stage lost) of each loss.
"""

import json
import sys
from pathlib import Path

import yaml
from benchmarks.support.approximate.staged_model import StagedModel, Strategy

from mainstay_core.base.ids import JobUid
from mainstay_core.job.config import ApproximateConfig
from mainstay_core.job.spec import parse_training_job
from mainstay_core.wire.reinitialisation import OptimizerState
from mainstay_train.models import llama


def main() -> None:
    path, losses = Path(sys.argv[1]), json.loads(sys.argv[2])
    job = parse_training_job(yaml.safe_load(path.read_text()))
    config = job.to_job_config(JobUid("twin"))
    model = StagedModel(llama.workload(config.workload), config.shape)
    how = config.approximate or ApproximateConfig()
    moments = OptimizerState(how.optimizer_state)
    strategy = Strategy(name="the product's", boost=how.lr_boost, optimizer_state=moments)
    digests = []
    for step in range(config.shape.steps):
        for _, stage in (loss for loss in losses if loss[0] == step):
            model.lose(stage, step, strategy, {})
        model.step(step)
        digests.append(model.masters_digest())
    sys.stdout.write(json.dumps(digests))


if __name__ == "__main__":
    main()
