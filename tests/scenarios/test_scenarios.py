"""The scenarios: each file is played on the real machine, and must say what it is expected to say.

``pytest tests/scenarios --rewrite`` writes what is said into the files. Nothing is
right because it was written: read the difference, and judge it by the protocol.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scenarios.coordinator_driver import CoordinatorDriver
from tests.scenarios.ladder_driver import LadderDriver
from tests.scenarios.pool_driver import PoolDriver
from tests.scenarios.rank_driver import RankDriver
from tests.scenarios.scenario_files import (
    Block,
    Driver,
    Scenario,
    ScenarioError,
    parse,
    play,
    read,
    render,
)
from tests.scenarios.supervisor_driver import SupervisorDriver

from mainstay_core.coordinator import ladder

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.txt"))
DRIVERS: dict[str, type[Driver]] = {
    "coordinator": CoordinatorDriver,
    "ladder": LadderDriver,
    "pool": PoolDriver,
    "rank": RankDriver,
    "supervisor": SupervisorDriver,
}
"""By the first word of a file's name."""


def driver_of(path: Path) -> Driver:
    return DRIVERS[path.stem.partition("-")[0]]()


def check(scenario: Scenario, driver: Driver, name: str) -> None:
    """Fail with the difference if a scenario says something else than is expected."""
    for block in scenario.blocks:
        assert block.expected, f"{name}:{block.line}: nothing is expected of {block.commands[0]}"
    expected, said = render(scenario).splitlines(), render(play(scenario, driver)).splitlines()
    if said != expected:
        names = (f"{name}, expected", f"{name}, said")
        raise AssertionError("\n".join(difflib.unified_diff(expected, said, *names, lineterm="")))


def perform(path: Path, *, rewrite: bool) -> None:
    """Play a file; fail if it says something else than is expected, or write what it says."""
    scenario = read(path)
    if rewrite:
        path.write_text(render(play(scenario, driver_of(path))))
    else:
        check(scenario, driver_of(path), path.name)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_scenario_says_what_is_expected(path: Path, request: pytest.FixtureRequest) -> None:
    perform(path, rewrite=request.config.getoption("--rewrite", default=False))


RULES = (
    *(f"row {row.value} {row.name.lower().replace('_', '-')}" for row in ladder.Row),
    "a pod's loss is one plan",
    "bad state",
    "budget of repairs",
    "certificate",
    "checkpoint known",
    "checkpoint void",
    "checkpoint voted",
    "computed with who is gone",
    "deadline of a leave",
    "drained nodes",
    "end",
    "escalation",
    "fence",
    "fingerprint refused",
    "followers first",
    "force",
    "hand-over",
    "hang",
    "heal checked",
    "hints of nodes",
    "hold-back",
    "hopeless vote",
    "incarnations",
    "injected faults",
    "intact chain",
    "join",
    "join and heal",
    "late is not gone",
    "launcher lost",
    "leave waits",
    "level-triggered",
    "lost nodes",
    "mark and certificate",
    "mating",
    "patch",
    "placement by nodes",
    "planned plan",
    "pod losses",
    "pool filled",
    "pool of a suspended job",
    "pool of an ended job",
    "pool of local mode",
    "redone from what is held",
    "refused vote recomputed",
    "refused votes learnt from reports",
    "restart",
    "restarts of a slot",
    "returning ranks",
    "rival plans",
    "roll",
    "same exception",
    "scaling",
    "settle",
    "silence counts against others",
    "silent death of a leaver",
    "start",
    "states judged in a settle",
    "step",
    "store reopened",
    "store recovered from supervisors",
    "stuck on its image",
    "submitted again",
    "suspected twice",
    "suspension",
    "taken back",
    "told again",
    "weak evidence",
)
"""Each row of the ladder (design section 5), and each rule of the protocol that has a name."""


def test_every_rule_is_shown_by_a_scenario_and_no_other() -> None:
    shown = {rule for path in FILES for rule in read(path).rules}

    assert shown == set(RULES)


NAMED: dict[str, str] = {
    "Rule A.": "tests/train/test_checklist.py",
    "Rule B.": "tests/train/test_checklist.py",
    "A cause that comes back.": "escalation",
    "Facts that wait.": "tests/core/supervisor/test_machine.py",
    "follower": "followers first",
    "Computing": "step",
    "Reducing": "step",
    "Voting": "certificate",
    "Blocked, and a member is gone": "redone from what is held",
    "witness": "tests/core/rank/steps/test_witness.py",
    "reaches": "roll",
    "patched": "patch",
    "hand-over": "hand-over",
    "A stage that nobody holds.": "row 3 replay",
    "Going back before wrong steps.": "tests/core/coordinator/test_taints.py",
    "A fork.": "tests/core/rank/forks/test_fork_plan.py",
    "repeat the lineage": "tests/core/rank/forks/test_repeats.py",
    "Snapshots in memory.": "tests/core/rank/test_windows.py",
    "window": "tests/core/rank/test_windows.py",
    "replay": "tests/core/rank/replays/test_replaying.py",
    "Fencing": "fence",
    "Plans from supervisor to supervisor.": "tests/core/supervisor/test_gossip.py",
    "A store that does not know the plan.": "store recovered from supervisors",
    "behind": "store recovered from supervisors",
    "No plan is made before every known pod was heard": "store reopened",
}
"""What docs/protocol.md sets off as a name, and the rule of a scenario that shows it. What no
scenario can show, as it is about bytes or about sockets, has a test of its own."""
WORDS = {"position", "stage", "commit chain"}
"""Set off as well, but words that the page explains, no rules."""


def test_whatever_the_protocol_names_is_shown_by_a_scenario_or_has_a_test() -> None:
    root = HERE.parent.parent
    page = (root / "docs" / "protocol.md").read_text()
    names = {found[1] for found in re.finditer(r"(?<!\*)\*{1,2}([^*|\n]+)\*{1,2}(?!\*)", page)}

    assert names == NAMED.keys() | WORDS
    unknown = {place for place in NAMED.values() if place not in RULES}
    assert not {place for place in unknown if not (root / place).is_file()}


def test_every_scenario_says_first_what_it_tells_and_shows() -> None:
    for path in FILES:
        title, shows, *_ = path.read_text().splitlines()
        assert title.startswith("# "), path.name
        assert title.endswith("."), path.name
        assert shows.startswith("# Shows: "), path.name


# What holds the scenarios themselves -----------------------------------------------------------


EXAMPLE = """\
# A launcher connects.

pod slots=1
launcher-up
----
> pod slots=1
  a pod of 1 slot begins
> launcher-up
  nothing follows
= at 0 s slot 0 down
"""


def test_a_file_is_written_as_it_was_read() -> None:
    for path in FILES:
        assert render(read(path)) == path.read_text(), path.name


def test_what_a_scenario_says_may_be_expected_of_it() -> None:
    check(parse(EXAMPLE), SupervisorDriver(), "example")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("begins", "ends"),
        ("nothing follows", "* has its launcher fork demo-1/0.1 on slot 0"),
        ("= at 0 s slot 0 down\n", ""),
        ("= at 0 s slot 0 down\n", "= at 0 s slot 0 down\n= at 0 s slot 0 down\n"),
    ],
)
def test_a_scenario_fails_when_something_else_is_expected(right: str, wrong: str) -> None:
    with pytest.raises(AssertionError, match=r"example, expected[\s\S]*example, said"):
        check(parse(EXAMPLE.replace(right, wrong)), SupervisorDriver(), "example")


def test_the_last_line_of_the_last_block_counts() -> None:
    path = HERE / "pool-budget.txt"
    scenario = read(path)
    (number, last) = [(n, p) for n, p in enumerate(scenario.parts) if isinstance(p, Block)][-1]
    shorter = replace(last, expected=(*last.expected[:-1], "something else"))
    parts = (*scenario.parts[:number], shorter, *scenario.parts[number + 1 :])

    with pytest.raises(AssertionError):
        check(Scenario(parts=parts), driver_of(path), path.name)


def test_a_scenario_of_which_nothing_is_expected_fails() -> None:
    with pytest.raises(AssertionError, match="nothing is expected of launcher-up"):
        check(parse("launcher-up\n----\n"), SupervisorDriver(), "example")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("launcher-up\n", "line 1: a block of commands ends with a line ----"),
        ("# Prose.\n\n----\nnothing\n", "line 3: there is no command above ----"),
        ("launch\n----\n", "line 1: launch: there is no command launch"),
        ("pod\nlauncher-up soon\n----\n", "line 2: launcher-up soon: launcher-up knows no soon"),
        ("pod slot=2\n----\n", "line 1: pod slot=2: pod knows no slot"),
        ("pod slots=two\n----\n", "line 1: pod slots=two: two is no number"),
        ("pod slots=1 slots=2\n----\n", "line 1: pod slots=1 slots=2: a field is given twice"),
        ("pod slots=1.5\n----\n", "slots is 1.5, must be a whole number"),
        ("tick\n----\n", "line 1: tick: a word is missing"),
        ('says "0\n----\n', "line 1: No closing quotation"),
        ("hello 0\n----\n", "slot 0 has had 0 trainers"),
    ],
)
def test_a_mistake_in_a_scenario_is_told_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        play(parse(text), SupervisorDriver())


def test_rewriting_writes_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "supervisor-example.txt"
    path.write_text(EXAMPLE.replace("begins", "ends"))

    with pytest.raises(AssertionError):
        perform(path, rewrite=False)
    perform(path, rewrite=True)

    assert path.read_text() == EXAMPLE
    perform(path, rewrite=False)
