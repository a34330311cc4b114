"""Writes the chart's README: what is written by hand, then a table of all values.

Usage: python scripts/chart_readme.py [--check]

The table comes from values.yaml and the comments in it. A comment stands right above the value or
the section that it is about; every value has one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from generated import keep

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/mainstay"
README = CHART / "README.md"
MARK = "<!-- From here on made by scripts/chart_readme.py from values.yaml; do not edit. -->\n"


def render() -> str:
    """Return the README: the part above the mark as it is, the table anew."""
    by_hand = README.read_text().partition(MARK)[0] if README.is_file() else ""
    text = (CHART / "values.yaml").read_text()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    lines = ["", "## Values", "", "| value | default | |", "| --- | --- | --- |"]
    rows = list(_rows(root, text.splitlines(), ""))
    if bare := [path for path, _, about in rows if not about]:
        raise SystemExit(f"values.yaml: no comment says what these are: {', '.join(bare)}")
    for path, default, about in rows:
        cells = (f"`{path}`", f"`{default}`" if default else "", about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return by_hand + MARK + "\n".join(lines) + "\n"


def _rows(node: yaml.MappingNode, lines: list[str], path: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, default, description); a section that has a description is a row as well."""
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else key.value
        about = _comment_above(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            if about:
                yield name, "", about
            yield from _rows(value, lines, name)
        else:
            yield name, _source(value, lines), about


def _comment_above(lines: list[str], line: int) -> str:
    """Return the comment that ends on the line before one."""
    words: list[str] = []
    while line > 0 and lines[line - 1].strip().startswith("#"):
        line -= 1
        words.insert(0, lines[line].strip().removeprefix("#").strip())
    # The first comment of the file is about the file.
    return "" if line == 0 else " ".join(words)


def _source(node: yaml.Node, lines: list[str]) -> str:
    """Return a value as it stands in the file, on one line."""
    begin, end = node.start_mark, node.end_mark
    if isinstance(node, yaml.SequenceNode) and not node.flow_style:
        items = [item.strip() for item in lines[begin.line : end.line]]
        return ", ".join(item for item in items if item and item[0] != "#")
    if begin.line == end.line:
        return lines[begin.line][begin.column : end.column]
    first, last = lines[begin.line][begin.column :], lines[end.line][: end.column]
    return " ".join(part.strip() for part in [first, *lines[begin.line + 1 : end.line], last])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say what differs, write nothing")
    check = parser.parse_args().check
    problem = "is not what values.yaml describes; run `python scripts/chart_readme.py`"
    return keep({README: render()}, problem, check=check)


if __name__ == "__main__":
    sys.exit(main())
