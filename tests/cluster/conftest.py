"""The release that tests of whole jobs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.cluster import toolbox
from tests.cluster.cluster import Cluster
from tests.cluster.fixtures import reason_told
from tests.cluster.release import Platform


@pytest.fixture(scope="session")
def platform(cluster: Callable[[int], Cluster]) -> Platform:
    """The chart as Helm has installed it, on three nodes."""
    with reason_told():
        made = Platform(cluster(3), toolbox.say_to_stdout)
    made.install()
    return made
