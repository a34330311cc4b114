"""`make images` takes an engine that works, however many on PATH do not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from tests.core.scripts import load_script


@pytest.fixture
def images() -> ModuleType:
    return load_script("images")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH that may hold engines."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ENGINE", raising=False)
    return tmp_path


def make_engine(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


DEAD = 'echo "Cannot connect to the Docker daemon at unix:///run/docker.sock." >&2; exit 1'


def test_an_engine_whose_socket_is_dead_is_passed_over(images: ModuleType, folder: Path) -> None:
    make_engine(folder, "docker", DEAD)
    make_engine(folder, "buildah", '[ "$1" = info ]')
    assert images.find_engine() == "buildah"


def test_an_engine_that_never_answers_is_passed_over(images: ModuleType, folder: Path) -> None:
    images.ANSWER_S = 0.05
    make_engine(folder, "docker", "exec /bin/sleep 60")
    assert "`docker info` has not answered" in images.find_problem("docker")


def test_where_none_works_each_says_why(images: ModuleType, folder: Path) -> None:
    make_engine(folder, "docker", DEAD)
    make_engine(folder, "podman", "exit 3")
    with pytest.raises(SystemExit) as ended:
        images.find_engine()
    said = str(ended.value).splitlines()
    assert "name another by ENGINE" in said[0]
    assert "docker: Cannot connect to the Docker daemon" in said[1]
    assert "podman: `podman info` failed with 3" in said[2]
    assert "buildah: is not on PATH" in said[3]


def test_an_engine_that_is_named_is_taken(
    images: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine(folder, "docker", "exit 0")
    monkeypatch.setenv("ENGINE", "nerdctl")
    assert images.find_engine() == "nerdctl"
