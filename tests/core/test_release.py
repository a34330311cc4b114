"""The version is said in several places, and is one."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

from mainstay_core.base.release import VERSION
from mainstay_operator.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


def test_there_is_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "charts/mainstay/Chart.yaml").read_text())
    assert project["version"] == chart["version"] == chart["appVersion"] == VERSION


def test_the_operator_shows_its_version() -> None:
    series = f'mainstay_build_info{{name="mainstay-operator",version="{VERSION}"}} 1.0'
    assert series in Metrics().render().decode()
