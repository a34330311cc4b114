"""Sums that all members compute for themselves: no Python version changes a bit of them."""

from __future__ import annotations

import ast
import math
from pathlib import Path

from mainstay_core.base.sums import add_in_order

ROOT = Path(__file__).parents[3]
ROUNDED = (0.1,) * 10
"""Of which a compensated sum has other bits."""


def test_numbers_are_added_left_to_right_with_a_rounding_at_each() -> None:
    assert math.fsum(ROUNDED) == 1.0
    assert add_in_order(ROUNDED) == 0.9999999999999999
    assert add_in_order([1e16, 1.0, -1e16]) == 0.0
    assert add_in_order([]) == 0.0
    assert type(add_in_order([1, 2])) is float


def test_no_built_in_sum_begins_with_a_floating_point_number() -> None:
    """Whoever writes a start of 0.0 adds floats, which the built-in compensates since 3.12."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for part in ("core", "agent")
        for path in sorted((ROOT / part).rglob("*.py"))
        if "sum(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sum"
        and any(_is_float(start) for start in (*node.args[1:], *(k.value for k in node.keywords)))
    ]
    assert not found, "add floats with mainstay_core.base.sums.add_in_order"


def _is_float(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float)
