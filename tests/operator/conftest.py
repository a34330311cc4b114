from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.world import World, world_on


@pytest.fixture
def world(control_plane: Any, tmp_path: Path) -> Iterator[World]:
    with world_on(control_plane, tmp_path) as made:
        yield made
