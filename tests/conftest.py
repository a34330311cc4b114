"""What all tests share: the fixtures of a real Kubernetes (tests/cluster/README.md)."""

from tests.cluster.fixtures import (
    cluster,
    control_plane,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)

__all__ = [
    "cluster",
    "control_plane",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
]
