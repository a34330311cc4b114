"""Rules and dashboards ask for metrics that the api has, in a language that Prometheus reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.chart.charts import CHART

from mainstay_api.metrics import Metrics

DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
RULES = CHART / "files/rules.yaml"
WORD = re.compile(r"mainstay_[a-z_]+")
LABELS = re.compile(r"(?:by|on|without|group_left) \(([a-z_, ]+)\)|([a-z_]+)=~?\"")


@pytest.fixture(scope="module")
def promtool() -> str:
    """Debian has it in the package prometheus."""
    if shutil.which("promtool") is None and os.getuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-qq"], ["install", "-y", "-qq", "prometheus"]):
            subprocess.run(["apt-get", *command], env=environment, capture_output=True, check=False)
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool (Debian's package prometheus)")
    return found


def known_metrics() -> dict[str, set[str]]:
    """The names under which the api's metrics are scraped, with their labels."""
    known = {}
    counted = Metrics().registry
    for collector, names in counted._collector_to_names.items():
        labels = set(getattr(collector, "_labelnames", ()))
        for name in names:
            known[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return known


def expressions() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.stem}: ${variable['name']}", variable["query"]["query"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_only_metrics_and_labels_that_exist_are_asked_for(where: str, expression: str) -> None:
    known = known_metrics()
    names = WORD.findall(expression)
    assert names, where
    for name in names:
        assert name in known, f"{where}: there is no {name}"
    labels = {
        label.strip()
        for match in LABELS.findall(expression)
        for label in ",".join(match).split(",")
    } - {""}
    assert labels <= set().union(*(known[name] for name in names)), where


def test_dashboards_can_be_told_apart_and_do_not_overlap() -> None:
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 2
    for board in boards:
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24, panel["title"]
            taken |= cells


def test_prometheus_reads_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_every_query_of_the_dashboards(promtool: str, tmp_path: Path) -> None:
    queries = [e for where, e in expressions() if "label_values" not in e and ": " in where]
    rules = [
        {"record": f"dashboard:query:{i}", "expr": query.replace("$job", "some")}
        for i, query in enumerate(queries)
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_on_what_they_are_about(promtool: str, tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / "rules.yaml")
    heard = {"series": 'mainstay_heartbeats_total{job="j"}', "values": "0+60x60"}
    stalled = {"series": 'mainstay_steps_committed_total{job="j"}', "values": "100+0x60"}
    running = {"series": 'mainstay_steps_committed_total{job="j"}', "values": "0+10x60"}
    scraped = {"series": 'mainstay_api_request_seconds_count{status="200"}', "values": "0+1x60"}
    failing = {"series": 'mainstay_api_request_seconds_count{status="503"}', "values": "0+1x60"}
    text = yaml.safe_load(RULES.read_text())
    said = {rule["alert"]: rule for group in text["groups"] for rule in group["rules"]}

    def fires(alert: str, **labels: str) -> list[dict[str, object]]:
        rule = said[alert]
        annotations = {
            key: value.replace("{{ $labels.job }}", labels.get("job", ""))
            for key, value in rule["annotations"].items()
        }
        return [{"exp_labels": {**rule["labels"], **labels}, "exp_annotations": annotations}]

    cases = [
        ("MainstayJobStalled", [heard, stalled], fires("MainstayJobStalled", job="j")),
        ("MainstayJobStalled", [heard, running], []),
        ("MainstayApiDown", [heard], fires("MainstayApiDown")),
        ("MainstayApiDown", [scraped], []),
        ("MainstayStoreUnavailable", [failing], fires("MainstayStoreUnavailable")),
        ("MainstayStoreUnavailable", [scraped], []),
    ]
    tests = [
        {
            "interval": "1m",
            "input_series": series,
            "alert_rule_test": [{"eval_time": "50m", "alertname": alert, "exp_alerts": expected}],
        }
        for alert, series, expected in cases
    ]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
