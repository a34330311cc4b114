"""What a cluster shows people of a job: Events, metrics, and what `kubectl mainstay` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.cluster.release import JOBS
from tests.cluster.stories import Story

from mainstay_core.wire.recoveries import Recovery, read_recovery

API_PORT = 8080
PLUGIN = f'#!/bin/sh\nexec {sys.executable} -m mainstay_cli.commands.kubectl "$@"\n'
COMMON = {"job", "namespace", "name"}
"""Labels that every series of a job has."""


def recoveries_of(story: Story) -> list[Recovery]:
    return [read_recovery(told) for told in story.platform.fetch(story.uid, "recoveries")]


def events_of(story: Story) -> list[tuple[str, str]]:
    """Return reason and message of each Event of a job."""
    events = story.platform.api.list(f"/api/v1/namespaces/{JOBS}/events")
    ours = (e for e in events if e["involvedObject"].get("uid") == story.uid)
    return [(str(e["reason"]), str(e["message"])) for e in ours]


def ask_plugin(story: Story, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``kubectl mainstay`` for a job, by a real kubectl, as the admin."""
    cluster, folder = story.platform.cluster, story.platform.dir / "bin"
    plugin = folder / "kubectl-mainstay"
    if not plugin.exists():
        folder.mkdir()
        plugin.write_text(PLUGIN)
        plugin.chmod(0o755)
    environment = {
        "HOME": str(folder),
        "KUBECONFIG": str(cluster.kubeconfig),
        "NO_COLOR": "1",
        "PATH": os.pathsep.join([str(folder), os.defpath]),
    }
    return subprocess.run(
        [str(cluster.tools / "kubectl"), "mainstay", *words, "-n", JOBS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def run_plugin(story: Story, *words: str) -> str:
    """Run a command of ``kubectl mainstay`` for a job; return what it printed.

    Args:
        story: of the job.
        words: the command, and its options after the job's name. A command of a group is one word
            with a space, as ``faults inject``.
    """
    command, *options = words
    done = ask_plugin(story, *command.split(), story.name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def metrics_of(story: Story, *names: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, further label and value of a job's series, of each replica of the api."""
    platform = story.platform
    admin = {"Authorization": f"Bearer {platform.cluster.tokens['admin']}"}
    network = platform.cluster.nodes[platform.home].network
    for pod in platform.system("api"):
        url = platform.cluster.relay(pod["status"]["podIP"], API_PORT, network)
        answer = httpx.get(f"{url}/metrics", headers=admin, trust_env=False, timeout=30)
        answer.raise_for_status()
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name in names and sample.labels["job"] == story.uid:
                    label = "".join(sample.labels[key] for key in set(sample.labels) - COMMON)
                    yield sample.name, label, sample.value


def count_metrics(story: Story, *names: str) -> dict[tuple[str, str], float]:
    """Return a job's counters by name and further label, summed over the replicas of the api.

    Counters are there from the beginning: those of what has not happened are zero, and left out.
    """
    sums = Counter[tuple[str, str]]()
    for name, label, value in metrics_of(story, *names):
        sums[name, label] += value
    return {key: value for key, value in sums.items() if value}
