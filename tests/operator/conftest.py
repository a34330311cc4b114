from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worlds.served_namespace import ServedNamespace, serve_namespace


@pytest.fixture(scope="module")
def served(
    control_plane: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedNamespace]:
    """One operator for the jobs of a module's tests: each has a name of its own."""
    environment = {
        "MAINSTAY_RESYNC_S": "0.5",
        "MAINSTAY_FORCE_DELETE_S": "1",
        "MAINSTAY_IMAGE_PULL_S": "1",
    }
    with serve_namespace(control_plane, tmp_path_factory.mktemp("served"), **environment) as made:
        yield made


@pytest.fixture
def own_served(control_plane: Any, tmp_path: Path) -> Iterator[ServedNamespace]:
    """For tests that end the operator, the api or Redis."""
    environment = {
        "MAINSTAY_RESYNC_S": "0.5",
        "MAINSTAY_MAX_IDLE_S": "2",
    }
    with serve_namespace(control_plane, tmp_path, **environment) as made:
        yield made


@pytest.fixture
def seldom_served(control_plane: Any, tmp_path: Path) -> Iterator[ServedNamespace]:
    """An operator that asks the api by itself once only."""
    with serve_namespace(control_plane, tmp_path, MAINSTAY_POLL_S="3600") as made:
        yield made
