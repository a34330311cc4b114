"""What no linter knows of the tree is checked, and the check would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.scripts import load_script

CHECK = load_script("check_tree")
NOWHERE = "mainstay" + "_cli"
"""In two parts, or the check would find the misspelt names below in this file."""


@pytest.mark.parametrize(
    ("line", "dead"),
    [
        ("from mainstay_cli.commands import main", []),
        ("from mainstay_core.pool.repair import plan_repair", []),
        ("`mainstay_core.coordinator.recovery.decide_running` decides", []),
        ("the public `mainstay_train.loop`", []),
        ('CODE = "from {} import local_run, main"', ["{}.local_run", "{}.main"]),
        ("see :mod:`{}.cluster.plugin`", ["{}.cluster.plugin"]),
        ("python -m {}.plugin", ["{}.plugin"]),
        ("`{}.local.run.run_nothing`", ["{}.local.run.run_nothing"]),
    ],
)
def test_a_name_of_a_module_that_does_not_exist_is_found(
    tmp_path: Path, line: str, dead: list[str]
) -> None:
    file = tmp_path / "text.md"
    file.write_text(line.replace("{}", NOWHERE))

    told = CHECK.find_dead_modules(file)

    assert [fault.partition(" names ")[2].partition(",")[0] for fault in told] == [
        name.replace("{}", NOWHERE) for name in dead
    ]


@pytest.mark.parametrize(
    ("summary", "riddle"),
    [
        ("Which nodes a job stays off.", True),
        ("From kill -9 to the next step.", True),
        ("Short one.", True),
        ("Decides which nodes a job stays off.", False),
    ],
)
def test_a_summary_that_does_not_say_what_the_thing_is_is_found(
    tmp_path: Path, summary: str, riddle: bool
) -> None:
    file = tmp_path / "module.py"
    file.write_text(f'"""{summary}"""\n')

    assert bool(CHECK.find_riddles(file)) is riddle
