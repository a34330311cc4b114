"""The files of the scenarios: commands in plain words, and what is expected of them.

A file is prose with blocks in between. A block is one or more command lines, a
line ``----``, and the expected output up to the next blank line::

    # A trainer dies while the others compute.
    trainer-died demo-3/0 why="killed by signal 9" at 12.0
    ----
    trainer demo-3/0 ended: killed by signal 9; ...

A command is a name, then words, then fields ``name=value``, then perhaps the
time at which it happens, ``at SECONDS``. A word or value with blanks stands in
double quotes. What a command says is left out after ``quietly``.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

RULE = "----"
QUIETLY = "quietly "
WIDTH = 100


class ScenarioError(Exception):
    """A scenario that cannot be read, or asks for what does not exist.

    Args:
        line: number of the line in the file.
        problem: what is wrong, in one sentence.
    """

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Commands and what is expected of them."""

    line: int
    commands: tuple[str, ...]
    expected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One file: lines of prose and blocks, in order."""

    parts: tuple[str | Block, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks alone."""
        return tuple(p for p in self.parts if isinstance(p, Block))

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules that the scenario shows, from its line ``# Shows: one; another``."""
        heads = [p for p in self.parts if isinstance(p, str) and p.startswith("# Shows: ")]
        return tuple(rule for p in heads for rule in p.removeprefix("# Shows: ").split("; "))


def read(path: Path) -> Scenario:
    """Return the scenario in a file.

    Raises:
        ScenarioError: a block has no ``----``, or no command before it.
    """
    return parse(path.read_text())


def parse(text: str) -> Scenario:
    """Return the scenario that a text holds; see :func:`read`."""
    parts: list[str | Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            parts.append(lines[at])
            at += 1
            continue
        first, commands, expected = at, [], []
        while at < len(lines) and lines[at].strip() and lines[at] != RULE:
            commands.append(lines[at])
            at += 1
        if at == len(lines) or lines[at] != RULE:
            raise ScenarioError(first + 1, f"a block of commands ends with a line {RULE}")
        if not commands:
            raise ScenarioError(first + 1, f"there is no command above {RULE}")
        at += 1
        while at < len(lines) and lines[at].strip():
            expected.append(lines[at])
            at += 1
        parts.append(
            Block(line=first + 1, commands=tuple(commands), expected=tuple(expected)),
        )
    return Scenario(parts=tuple(parts))


def render(scenario: Scenario) -> str:
    """Return a scenario as the text of its file."""
    lines: list[str] = []
    for part in scenario.parts:
        if isinstance(part, Block):
            lines += [*part.commands, RULE, *part.expected]
        else:
            lines.append(part)
    return "\n".join(lines) + "\n"


class Call:
    """One command line, whose words and fields the driver takes one by one.

    What nobody took is a mistake of whoever wrote the scenario (:meth:`finish`).

    Raises:
        ScenarioError: the line is no command.
    """

    def __init__(self, text: str, line: int) -> None:
        try:
            parts = shlex.split(text)
        except ValueError as error:
            raise ScenarioError(line, str(error)) from error
        self.text, self.line = text, line
        self.at_s: float | None = None
        if len(parts) > 2 and parts[-2] == "at":
            self.at_s = self._as_number(parts[-1])
            parts = parts[:-2]
        self.name, rest = parts[0], parts[1:]
        self._fields = dict(part.split("=", 1) for part in rest if "=" in part)
        self._words = [part for part in rest if "=" not in part]
        if len(self._fields) + len(self._words) != len(rest):
            raise self.error("a field is given twice")

    def error(self, problem: str) -> ScenarioError:
        """Return the error that names this command's line."""
        return ScenarioError(self.line, f"{self.text}: {problem}")

    def flag(self, word: str) -> bool:
        """Take a word that is there or not."""
        given = word in self._words
        if given:
            self._words.remove(word)
        return given

    def word(self) -> str:
        """Take the next word."""
        if not self._words:
            raise self.error("a word is missing")
        return self._words.pop(0)

    def words(self) -> list[str]:
        """Take all words that are left, ``demo-0..2`` standing for demo-0, demo-1 and demo-2."""
        taken, self._words = self._words, []
        return [name for word in taken for name in self._range(word)]

    def has(self, field: str) -> bool:
        """Whether a field is given."""
        return field in self._fields

    def get(self, field: str, default: str = "") -> str:
        """Take a field's text."""
        return self._fields.pop(field, default)

    def need(self, field: str) -> str:
        """Take a field's text, which must be given."""
        if field not in self._fields:
            raise self.error(f"the field {field} is missing")
        return self._fields.pop(field)

    def names(self, field: str) -> tuple[str, ...]:
        """Take a field that lists names, with commas in between."""
        text = self.get(field)
        return tuple(name for part in text.split(",") if part for name in self._range(part))

    def number(self, field: str, default: float = 0.0) -> float:
        """Take a field's number."""
        return self._as_number(self._fields.pop(field)) if self.has(field) else default

    def count(self, field: str, default: int = 0) -> int:
        """Take a field's whole number."""
        number = self.number(field, default)
        if number != int(number):
            raise self.error(f"{field} is {number}, must be a whole number")
        return int(number)

    def finish(self) -> None:
        """See that everything was taken.

        Raises:
            ScenarioError: the command has no such word or field.
        """
        left = [*self._words, *self._fields]
        if left:
            raise self.error(f"{self.name} knows no {', '.join(left)}")

    def _range(self, word: str) -> Iterable[str]:
        first, dots, last = word.partition("..")
        if not dots:
            return [word]
        stem = first.rstrip("0123456789")
        return [f"{stem}{n}" for n in range(int(first[len(stem) :]), int(last) + 1)]

    def _as_number(self, text: str) -> float:
        try:
            return float(text)
        except ValueError as error:
            raise self.error(f"{text} is no number") from error


Command = Callable[[Call], list[str]]
"""Carries a command out and returns the lines that it says."""


class Driver:
    """What carries out the commands of one kind of scenario, on a real machine of core."""

    def commands(self) -> dict[str, Command]:
        """Return the commands by name."""
        raise NotImplementedError

    def show(self) -> list[str]:
        """Return the lines that stand at the end of each block: the state, in short."""
        return []


def play(scenario: Scenario, driver: Driver) -> Scenario:
    """Return the scenario with what its commands really say as what is expected.

    Raises:
        ScenarioError: it uses a command, a word or a field that there is not.
    """
    parts = [
        replace(part, expected=tuple(_play_block(part, driver)))
        if isinstance(part, Block)
        else part
        for part in scenario.parts
    ]
    return Scenario(parts=tuple(parts))


def _play_block(block: Block, driver: Driver) -> list[str]:
    known, said = driver.commands(), []
    for number, text in enumerate(block.commands):
        call = Call(text.removeprefix(QUIETLY), block.line + number)
        if call.name not in known:
            raise call.error(f"there is no command {call.name}; there are {', '.join(known)}")
        lines = known[call.name](call)
        call.finish()
        lines = [] if text.startswith(QUIETLY) else lines
        if len(block.commands) > 1:
            said += [f"> {text}", *(f"  {line}" for line in lines)]
        else:
            said += lines
    said += driver.show()
    assert all(line.strip() for line in said), f"{block.commands} say a blank line"
    return [wrapped for line in said for wrapped in _wrap(line)]


def _wrap(line: str) -> list[str]:
    """A line of output, cut where a reader's window ends."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
    )
