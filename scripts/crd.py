"""Writes what the TrainingJob model describes: the CustomResourceDefinition, and its reference.

Usage: python scripts/crd.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from generated import keep

from mainstay_core.job.crd import VALIDATIONS, build_crd, build_schema
from mainstay_core.job.crd_rules import UNCHANGEABLE
from mainstay_core.job.types import AMOUNT_RULES

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "charts/mainstay/files/crd.yaml", ROOT / "manifests/crd.yaml")
REFERENCE = ROOT / "docs/trainingjob.md"
MARK = "<!-- From here on made by scripts/crd.py from the model; do not edit. -->\n"
HEADER = (
    "# Generated from the model in core/mainstay_core/job/spec.py by scripts/crd.py; do not edit.\n"
)


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: equal parts are written out each time."""

    def ignore_aliases(self, data: object) -> bool:
        del data
        return True


def render_crd() -> str:
    """Return the CRD's YAML."""
    text = yaml.dump(build_crd(), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=False)
    return HEADER + text


def render_reference() -> str:
    """Return the reference: what is written by hand, then a table of all fields."""
    by_hand = REFERENCE.read_text().partition(MARK)[0] if REFERENCE.is_file() else ""
    schema = build_schema()["properties"]
    fixed = {f"{rule.section}{rule.field}" for rule in UNCHANGEABLE if "suspend" not in rule.rule}
    lines = ["", "## Spec", "", "| field | | meaning |", "| --- | --- | --- |"]
    for path, field in _fields(schema["spec"], "spec"):
        parents = {".".join(path.split(".")[: n + 1]) for n in range(path.count(".") + 1)}
        changes = "" if parents & fixed or "properties" in field else ", may change"
        shown = path.removeprefix("spec.")
        lines.append(f"| `{shown}` | {_kind(field)}{changes} | {_words(field)} |")
    lines += ["", "## Status", "", "| field | | meaning |", "| --- | --- | --- |"]
    for path, field in _fields(schema["status"], "status"):
        lines.append(f"| `{path.removeprefix('status.')}` | {_kind(field)} | {_words(field)} |")
    return by_hand + MARK + "\n".join(lines) + "\n"


def _fields(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, child
        yield from _fields(child, here)
        yield from _fields(child.get("items", {}), f"{here}[]")


def _kind(field: dict[str, Any]) -> str:
    """Return type, bounds and default of a field, in few words."""
    if "x-kubernetes-int-or-string" in field:
        text = "amount or Auto" if field[VALIDATIONS] == AMOUNT_RULES else "integer or Auto"
    elif "enum" in field:
        text = " or ".join(str(value) for value in field["enum"])
    elif field.get("type") == "array":
        text = "list"
    else:
        text = str(field.get("format") or field["type"]).replace("int64", "integer")
    if "minimum" in field:
        text += f" from {field['minimum']}"
    if "maximum" in field:
        text += f" to {field['maximum']}"
    default = field.get("default")
    if default is not None and not isinstance(default, dict):
        text += f", default {str(default).lower() if isinstance(default, bool) else default}"
    return text


def _words(field: dict[str, Any]) -> str:
    return str(field.get("description", "")).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    check = parser.parse_args().check
    texts = dict.fromkeys(FILES, render_crd()) | {REFERENCE: render_reference()}
    return keep(texts, "is not what the model describes; run `make crd`", check=check)


if __name__ == "__main__":
    sys.exit(main())
