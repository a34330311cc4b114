"""Fuzzes TrainingJobs: the model, what is derived of it, and the checks of its pod template."""

from __future__ import annotations

from tests.fuzz.specs import MANIFEST, SMALL
from tests.fuzz.texts import NamedTexts, check_error, split

from mainstay_core.base import codec
from mainstay_core.base.errors import InvalidSpecError, MalformedError
from mainstay_core.base.ids import JobUid
from mainstay_core.job.config import JobConfig
from mainstay_core.job.pod_templates import check_template
from mainstay_core.job.shared_memory import plan_shared_memory
from mainstay_core.job.sizes.size_summary import summarize_sizes
from mainstay_core.job.spec import parse_training_job


class Spec:
    """TrainingJobs as a user may write them."""

    name = "spec"

    def __init__(self) -> None:
        self._texts = NamedTexts({"TrainingJob": [MANIFEST, MANIFEST, SMALL]})
        self.examples, self.make = self._texts.examples, self._texts.make
        self.smaller = self._texts.smaller

    def judge(self, data: bytes) -> bool:
        _, text = split(data)
        try:
            document = codec.parse_json(text, "document")
        except MalformedError:
            return False
        try:
            job = parse_training_job(document)
        except InvalidSpecError as error:
            check_error(error)
            return False
        config = job.to_job_config(JobUid("u"))
        written = codec.dumps(config)
        assert codec.loads(JobConfig, written.encode()) == config, "its pods read something else"
        assert 0 < job.num_worker_pods <= job.num_pods
        plan_shared_memory(config.entrypoint, config.workload, config.shape, by_nccl=True)
        summarize_sizes(
            config.entrypoint, config.workload, config.shape, recompute=config.recompute
        )
        if job.spec.template:
            try:
                check_template(job.spec)
            except InvalidSpecError as error:
                check_error(error)
                return False
        return True


TARGET = Spec
