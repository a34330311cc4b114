"""The CRD is what the model says: no API server is needed to see that."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mainstay_core.base.bounds import MAX_HOSTS
from mainstay_core.job import crd, crd_rules, spec
from mainstay_core.job.status import TrainingJobStatus
from mainstay_core.pool.conditions import ConditionType

ROOT = Path(__file__).parents[3]
SCHEMA = crd.build_schema()
FREE = {
    "spec.suspend",
    "spec.supervisor.resources",
    "spec.parallelism.replicas",
    "spec.parallelism.minReplicas",
    "spec.spares",
    "spec.activeDeadlineSeconds",
    "spec.ttlSecondsAfterFinished",
    "spec.detection.dmr",
    "spec.detection.witness",
    "spec.recovery.window",
    "spec.recovery.allowApproximate",
    "spec.recovery.approximateAfterLostSteps",
    "spec.recovery.approximate",
    "spec.recovery.quarantine",
    "spec.recovery.onHostsLost",
    "spec.recovery.onTaint",
}
"""What may change while a job lives."""


def fields(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field with its path, and the items of lists."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, child
        yield from fields(child, here)
    if "items" in node:
        yield f"{path}[]", node["items"]
        yield from fields(node["items"], f"{path}[]")


ALL = dict(fields(SCHEMA))


def test_the_files_are_what_the_model_describes() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/crd.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_field_is_described() -> None:
    own = {p: f for p, f in ALL.items() if p.startswith(("spec", "status")) and p[-1] != "]"}
    assert len(own) > 100
    assert [path for path, field in own.items() if not field.get("description")] == []


def test_everything_is_bounded_so_that_rules_stay_cheap() -> None:
    unbounded = [
        path
        for path, field in ALL.items()
        if path.startswith(("spec.", "status."))
        and (
            (field.get("type") == "string" and not {"maxLength", "enum", "format"} & set(field))
            or (field.get("type") == "array" and "maxItems" not in field)
        )
    ]
    assert unbounded == []


def test_the_schema_is_structural() -> None:
    for path, field in ALL.items():
        assert "type" in field or field.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "nullable", "title", "const"} & set(field), path


def test_unknown_fields_are_kept_in_the_template_and_the_workloads_config_alone() -> None:
    extra = {p: f["additionalProperties"] for p, f in ALL.items() if "additionalProperties" in f}
    free = {p for p, field in extra.items() if "x-kubernetes-preserve-unknown-fields" in field}
    assert free == {"spec.template.metadata", "spec.template.spec", "spec.workload.config"}
    assert "x-kubernetes-preserve-unknown-fields" not in {key for f in ALL.values() for key in f}


def test_every_field_of_the_model_is_in_the_schema_with_its_default() -> None:
    job = spec.parse_training_job(
        {
            "apiVersion": spec.API_VERSION,
            "kind": spec.KIND,
            "metadata": {"name": "demo"},
            "spec": {"training": {"steps": 1, "lanes": 1}, "workload": {"entrypoint": "a:b"}},
        }
    )
    dumped = job.spec.model_dump(by_alias=True)

    def check(values: dict[str, Any], path: str) -> None:
        for name, value in values.items():
            field = ALL[f"{path}.{name}"]
            if field.get("properties") and isinstance(value, dict):
                check(value, f"{path}.{name}")
            elif "default" in field:
                assert field["default"] == value
            else:
                assert value in (None, {}, ()) or name in ("steps", "lanes", "entrypoint"), name

    check(dumped, "spec")


def test_every_field_of_the_spec_may_change_or_has_a_rule_that_it_may_not() -> None:
    fixed = {
        f"{rule.section}{rule.field}".lstrip(".")
        for rule in crd_rules.UNCHANGEABLE
        if "oldSelf" in rule.rule
    }
    assert fixed & FREE == {"spec.suspend"}, "it may be set, under a condition"
    for path, field in ALL.items():
        parents = {".".join(path.split(".")[: n + 1]) for n in range(path.count(".") + 1)}
        if path.startswith("spec.") and not field.get("properties"):
            assert parents & (fixed | FREE), f"{path}: neither free to change nor fixed"


def test_rules_stand_at_sections_and_blame_fields_that_exist() -> None:
    for rule in crd_rules.RULES:
        assert rule.section == "" or "properties" in ALL[rule.section]
        path = f"{rule.section}{rule.field}".lstrip(".")
        assert path in ALL or path == "metadata.name"


def test_a_bound_that_came_later_is_no_rule_of_objects_that_may_be_there() -> None:
    """An API server refuses to write what breaks a rule: its status, and without its finalizers."""
    rules = [rule.rule for rule in crd_rules.RULES if rule.field == ".redundancy"]
    assert rules[0] == "type(self.redundancy) != int || self.redundancy <= self.training.lanes"
    assert all(str(MAX_HOSTS) not in rule for rule in rules)


def test_all_conditions_are_named_in_the_words_of_their_type() -> None:
    words = ALL["status.conditions[].type"]["description"]
    assert [name for name in ConditionType if name not in words] == []
    assert ALL["status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_columns_show_fields_that_the_status_has() -> None:
    for _, _, path, _ in crd.COLUMNS:
        assert path.lstrip(".") in ALL or path == ".metadata.creationTimestamp"


def test_a_status_says_only_what_was_observed() -> None:
    assert [
        path for path, field in ALL.items() if path[:6] == "status" and "default" in field
    ] == []
    assert TrainingJobStatus().model_dump(exclude_defaults=True) == {}


@pytest.mark.parametrize("name", ["State", "Ready", "Spares", "Step", "Recoveries", "Age"])
def test_the_columns_that_people_are_promised_are_there(name: str) -> None:
    assert name in {column for column, _, _, priority in crd.COLUMNS if priority == 0}
