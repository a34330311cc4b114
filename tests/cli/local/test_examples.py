"""The examples can be run as they are: local mode finds nothing to refuse in them."""

from pathlib import Path

import pytest

from mainstay_cli.local import manifests, preflight, sizes
from mainstay_core.job.model_sizes import BUILT_IN

EXAMPLES = Path(__file__).parents[3] / "examples"
FAULTS = {f"{name}-faults": name for name in ("approximate", "demo", "snapshots")}
"""Files of faults, and the job that each is for."""
JOBS = sorted(path for path in EXAMPLES.glob("*.yaml") if path.stem not in FAULTS)
ROOMY = preflight.Needs(base_memory_mib=1, pod_memory_mib=1, rank_memory_mib=1, disk_mib=1)
"""Of a machine that has enough of everything."""


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_an_example_passes_all_checks_before_a_run(path: Path, tmp_path: Path) -> None:
    file = manifests.load_job(path)
    assert file.job.metadata.name == path.stem
    preflight.check_entrypoint(file.job, manifests.search_path(path))
    preflight.check_memory(file.job, ROOMY)
    preflight.check_disk(file.job, tmp_path, ROOMY)
    # What a training loop of one's own takes is known only while it runs.
    if file.job.spec.workload.entrypoint in BUILT_IN:
        assert sizes.compute_sizes(file).ranks


@pytest.mark.parametrize(("faults", "job"), FAULTS.items())
def test_the_faults_of_an_example_fit_its_job(faults: str, job: str) -> None:
    file = manifests.load_job(EXAMPLES / f"{job}.yaml")
    assert manifests.load_faults(EXAMPLES / f"{faults}.yaml", file.job)
