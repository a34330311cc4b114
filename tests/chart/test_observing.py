"""Rules and dashboards ask for metrics that there are, in a language that Prometheus reads."""

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
from tests.chart.charts import CHART, ROOT

from mainstay_api.metrics import Metrics as ApiMetrics
from mainstay_operator.metrics import Metrics as OperatorMetrics

DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
RULES = CHART / "files/rules.yaml"
WORD = re.compile(r"mainstay_[a-z_]+")
LABELS = re.compile(r"(?:by|on|without|group_left) \(([a-z_, ]+)\)|([a-z_]+)(?:=~?|!=|!~)\"")
AGGREGATED = re.compile(r"(?:by|group_left) \(([a-z_, ]*)\)")
"""Labels that a result keeps."""


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
    """The names under which metrics of api and operator are scraped, with their labels."""
    known = {}
    for counted in (ApiMetrics().registry, OperatorMetrics().registry):
        for collector, names in counted._collector_to_names.items():
            labels = set(getattr(collector, "_labelnames", ()))
            for name in names:
                known[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return known


def pages() -> dict[str, str]:
    """The pages' texts by name; the history of changes names metrics that are gone."""
    return {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def test_every_metric_is_on_a_page_and_pages_name_no_other() -> None:
    packages = {path.name for path in ROOT.glob("*/mainstay_*")}
    known = known_metrics()
    named = {
        (page, name)
        for page, text in pages().items()
        for name in WORD.findall(text)
        if name not in packages
    }
    assert {(page, name) for page, name in named if name not in known} == set()
    # A counter is scraped as NAME_total; parts of a histogram are not named one by one.
    scraped = {name for name in known if f"{name}_total" not in known}
    parts = ("_bucket", "_count", "_sum", "_created")
    missing = {name for name in scraped if not name.endswith(parts)} - {n for _, n in named}
    assert missing == set()


def expressions() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
        for mark in board["annotations"]["list"]:
            yield f"{path.stem}: {mark['name']}", mark["expr"]
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


def shown() -> Iterator[tuple[str, str, set[str]]]:
    """What people see of a result: where, its expression, the labels that are named."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for mark in board["annotations"]["list"]:
            labels = set(re.findall(r"{{ *([a-z_]+) *}}", mark["titleFormat"])) - {"step"}
            assert '("step",' in mark["expr"], "the value is a label of its own"
            yield f"{path.stem}: {mark['name']}", mark["expr"], labels
        for panel in board["panels"]:
            for target in panel["targets"]:
                labels = set(re.findall(r"{{ *([a-z_]+) *}}", target.get("legendFormat", "")))
                yield f"{path.stem}: {panel['title']}", target["expr"], labels
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            text = " ".join(rule["annotations"].values())
            labels = set(re.findall(r"\$labels\.([a-z_]+)", text))
            yield rule["alert"], rule["expr"], labels


@pytest.mark.parametrize(("where", "expression", "labels"), list(shown()))
def test_legends_and_alerts_name_labels_that_the_result_has(
    where: str, expression: str, labels: set[str]
) -> None:
    kept = {label.strip() for match in AGGREGATED.findall(expression) for label in match.split(",")}
    assert labels <= kept, where


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
    ours = {"job": "j", "namespace": "n", "name": "llama"}
    heard = series("mainstay_heartbeats_total", "0+60x60", **ours)
    stalled = series("mainstay_job_step", "100+0x60", **ours)
    running = series("mainstay_job_step", "0+10x60", **ours)
    # After a restart: these steps count no second time, but the job does not stand still.
    again = series("mainstay_job_step", "100+10x20 100+10x40", **ours)
    counted = series("mainstay_steps_committed_total", "300+0x60", **ours)
    scraped = series("mainstay_api_request_seconds_count", "0+1x60", status="200")
    failing = series("mainstay_api_request_seconds_count", "0+1x60", status="503")
    # One replica of the api counts, another one only shows how the job is.
    idle = series("mainstay_job_step", "100+0x60", pod="other", **ours)
    lost = series("mainstay_steps_lost_total", "0+1x60", **ours)
    lost_once = series("mainstay_steps_lost_total", "0x40 12x20", **ours)
    often = series("mainstay_recoveries_total", "0+1x60", method="mask", **ours)
    seldom = series("mainstay_recoveries_total", "0x60", method="mask", **ours)
    recovery = "mainstay_recovery_seconds_bucket"
    slow = [series(recovery, "0x60", stage="load", le="60")]
    slow.append(series(recovery, "0+1x60", stage="load", le="300"))
    slow.append(series(recovery, "0+1x60", stage="load", le="+Inf"))
    request = "mainstay_api_request_seconds_bucket"
    late = [series(request, "0x60", le="1"), series(request, "0+1x60", le="5")]
    late.append(series(request, "0+1x60", le="+Inf"))
    acts = series("mainstay_operator_leader", "1x60", pod="one")
    waits = series("mainstay_operator_leader", "0x60", pod="two")
    age = "mainstay_operator_resync_age_seconds"
    refused = {"verb": "create", "resource": "pods", "code": "403"}
    pods = [
        series("mainstay_operator_job_pods", f"{count}x60", state=state, **ours)
        for state, count in (("wanted", 5), ("ready", 4))
    ]
    positions = "mainstay_job_positions"
    two = series(positions, "2x60", state="all", **ours)
    one = series(positions, "1x60", state="survive_pod", **ours)
    both = series(positions, "2x60", state="survive_pod", **ours)
    short = series("mainstay_job_snapshot_refused", "0+1x60", **ours)
    was_short = series("mainstay_job_snapshot_refused", "7x60", **ours)
    wrong = series("mainstay_check_findings_total", "0x30 0+1x30", verdict="primary", **ours)
    right = series("mainstay_check_findings_total", "3x60", verdict="primary", **ours)
    approximate = series("mainstay_job_approximate_since_step", "50x60", **ours)
    damaged = series("mainstay_damaged_copies_total", "0+1x60", **ours)
    no_more = series("mainstay_damaged_copies_total", "7x60", **ours)
    still = series("mainstay_job_snapshot_damaged", "0x40 2x20", **ours)
    was_there = series("mainstay_job_snapshot_damaged", "0x30 1x2 0x30", **ours)
    all_good = series("mainstay_job_snapshot_damaged", "0x60", **ours)
    cases: list[tuple[str, list[dict[str, str]], dict[str, str] | None]] = [
        ("MainstayJobStalled", [heard, stalled, idle], ours),
        ("MainstayJobStalled", [heard, running, idle], None),
        ("MainstayJobStalled", [heard, again, counted], None),
        ("MainstayApiDown", [heard], {}),
        ("MainstayApiDown", [scraped], None),
        ("MainstayStoreUnavailable", [failing], {}),
        ("MainstayStoreUnavailable", [scraped], None),
        ("MainstayJobLosesSteps", [lost], ours),
        ("MainstayJobLosesSteps", [lost_once], ours),
        ("MainstayJobApproximate", [approximate], ours),
        ("MainstayJobApproximate", [running, often], None),
        ("MainstayJobRecoversOften", [often], ours),
        ("MainstayJobRecoversOften", [seldom], None),
        ("MainstayWrongResult", [wrong], ours),
        ("MainstayWrongResult", [right], None),
        ("MainstayRecoverySlow", slow, {"stage": "load"}),
        ("MainstayApiSlow", late, {}),
        ("MainstayOperatorDown", [stalled], {}),
        ("MainstayOperatorDown", [stalled, waits], {}),
        ("MainstayOperatorDown", [stalled, acts, waits], None),
        ("MainstayOperatorDown", [], None),
        ("MainstayOperatorBlind", [series(age, "0+60x60")], {}),
        (
            "MainstayOperatorRefused",
            [series("mainstay_operator_kube_requests_total", "0+60x60", **refused)],
            {"resource": "pods", "code": "403"},
        ),
        ("MainstayPodsMissing", pods, ours),
        ("MainstayPodsMissing", pods[:1], None),
        ("MainstayJobUncovered", [two, one], ours),
        ("MainstayJobUncovered", [two, both], None),
        ("MainstaySnapshotsShort", [short], ours),
        ("MainstaySnapshotsShort", [was_short], None),
        ("MainstayCopiesDamaged", [damaged, all_good], ours),
        ("MainstayCopiesDamaged", [no_more, still], ours),
        ("MainstayCopiesDamaged", [was_there], ours),
        ("MainstayCopiesDamaged", [no_more, all_good], None),
    ]
    text = yaml.safe_load(RULES.read_text())
    said = {rule["alert"]: rule for group in text["groups"] for rule in group["rules"]}
    assert {alert for alert, _, labels in cases if labels is not None} == set(said)
    tests = []
    for alert, given, labels in cases:
        rule = said[alert]
        annotations = {
            key: filled(words, labels or {}, "50") for key, words in rule["annotations"].items()
        }
        fires = {"exp_labels": {**rule["labels"], **(labels or {})}, "exp_annotations": annotations}
        expected = [] if labels is None else [fires]
        check = {"eval_time": "50m", "alertname": alert, "exp_alerts": expected}
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": [check]})
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    """A series as promtool takes it."""
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{metric}{{{shown}}}", "values": values}


def filled(words: str, labels: dict[str, str], value: str) -> str:
    """An annotation as Prometheus fills it in."""
    for key, label in labels.items():
        words = words.replace(f"{{{{ $labels.{key} }}}}", label)
    words = words.replace("{{ $value | humanizeDuration }}", "50m 0s")
    words = words.replace('{{ $value | printf "%.0f" }}', value)
    return words.replace("{{ $value | humanize }}", value)
