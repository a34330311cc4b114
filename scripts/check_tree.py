"""Checks the files that git would carry for what no linter knows.

No file names a package index or a machine's own path; the top-level folders are no packages (an
operator/__init__.py would shadow the standard library's module), and every package says that it is
typed; modules and functions stay small; summaries say what a thing is; nothing names a file or a
module of ours that does not exist, not even inside of a string.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SELF = Path(__file__).resolve().relative_to(ROOT)

# What belongs to the machine of whoever wrote the line. A leading word character or slash means
# that the match is inside a longer path, which is not absolute.
MACHINE = re.compile(
    r"(?<![\w/.$}])/(?:root|work|home|Users|mnt)/\w|/tmp/(?:build|venv|uv)"
    r"|pythonhosted\.org|pypi\.org|/simple/?['\"\s]|(?:index|registry|artifactory|nexus)\.[\w-]+\.\w+"
    r"|--(?:extra-)?index-url|--find-links"
)
MAX_MODULE_LINES = 500
"""An alarm: a longer module probably holds two ideas."""
MAX_FUNCTION_LINES = 70
PRODUCT = ("agent", "api", "cli", "core", "operator", "scripts")
SUMMARISED = (*PRODUCT, "benchmarks", "examples")
RIDDLE = re.compile(
    r"(Of|What|Who|Whom|Whose|Whether|How|Where|When|Why|That|Which|From|Ending|Made|Told) "
)
MIN_SUMMARY_WORDS = 3
DESCRIBES_FIELDS = ("core/mainstay_core/job/spec.py", "core/mainstay_core/job/sections.py")
DESCRIBES_FIELDS += ("core/mainstay_core/job/status.py",)
DESCRIBES_FIELDS += ("core/mainstay_core/job/detection_sections.py",)
"""Docstrings here are the texts of ``kubectl explain``, where the field's name is the subject."""
LISTED = re.compile(r"^- ``(\w+)``: \S", re.MULTILINE)
"""A file in the list that a room's ``__init__.py`` gives, in reading order."""
MENTION = re.compile(r"`((?:agent|api|cli|core|tests|benchmarks|examples|docs|scripts)/[\w./-]+)`")
TOP_LEVEL = ("agent", "api", "cli", "core", "operator", "tests")
FOLDERS = {
    "mainstay_agent": "agent",
    "mainstay_api": "api",
    "mainstay_cli": "cli",
    "mainstay_core": "core",
    "mainstay_operator": "operator",
    "mainstay_train": "agent",
}
"""Where the packages lie."""
OURS = "|".join(FOLDERS)
DOTTED = re.compile(rf"(?<![\w.\-/])(?:{OURS})(?:\.[A-Za-z_]\w*)+")
IMPORT = re.compile(rf"\bfrom ({OURS}) import (\w+(?:, \w+)*)")
"""An import from a package itself; one from a module has a dotted name."""
MISSPELT = {"mainstay_train.Lopp", "mainstay_train.models.lama", "mainstay_train.models.nowhere"}
"""Names that tests misspell on purpose."""


def list_files() -> list[Path]:
    """Tracked files and those that git would add, relative to the root."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())


def find_machine_names(path: Path) -> list[str]:
    try:
        lines = (ROOT / path).read_text().splitlines()
    except UnicodeDecodeError:
        return []
    found = [(number, MACHINE.search(line)) for number, line in enumerate(lines, 1)]
    return [
        f"{path}:{number}: names an index or a machine's path: {match[0]}"
        for number, match in found
        if match is not None
    ]


def find_layout_faults(paths: list[Path]) -> list[str]:
    names = {str(path) for path in paths}
    faults = [
        f"{folder}/__init__.py: a top-level folder is no package"
        for folder in TOP_LEVEL
        if f"{folder}/__init__.py" in names
    ]
    packages = {
        path.parent
        for path in paths
        if path.name == "__init__.py" and len(path.parts) == 3 and path.parts[0] in TOP_LEVEL
    }
    faults += [
        f"{package}: py.typed is missing"
        for package in sorted(packages)
        if package.parts[0] != "tests" and str(package / "py.typed") not in names
    ]
    return faults


def find_long_code(path: Path) -> list[str]:
    """Modules and functions beyond the house limits."""
    text = (ROOT / path).read_text()
    num_lines = text.count("\n")
    faults = []
    if num_lines > MAX_MODULE_LINES:
        faults.append(f"{path}: {num_lines} lines, the limit is {MAX_MODULE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                limit = f"{num_lines} lines, the limit is {MAX_FUNCTION_LINES}"
                faults.append(f"{path}:{node.lineno}: {node.name} has {limit}")
    return faults


def find_riddles(path: Path) -> list[str]:
    """Summaries of modules and classes that do not say what the thing is."""
    if path.as_posix().startswith(DESCRIBES_FIELDS):
        return []
    faults = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Module | ast.ClassDef):
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if summary and (RIDDLE.match(summary) or len(summary.split()) < MIN_SUMMARY_WORDS):
                line = getattr(node, "lineno", 1)
                faults.append(f"{path}:{line}: does not say what it is: {summary!r}")
    return faults


@cache
def list_names(module: Path) -> frozenset[str]:
    """Return the names that a module defines or imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


def names_something(dotted: str) -> bool:
    """Return whether a dotted name is that of a package, of a module, or of something in one."""
    parts = dotted.split(".")
    path = ROOT / FOLDERS[parts[0]] / parts[0]
    for number, part in enumerate(parts[1:], 1):
        if not path.is_dir():
            return all(name in list_names(path) for name in parts[number:])
        module = path / f"{part}.py"
        if not (path / part).is_dir() and not module.is_file():
            return part in list_names(path / "__init__.py")
        path = module if module.is_file() else path / part
    return True


def find_dead_modules(path: Path) -> list[str]:
    """Names of our modules, in code, text and strings, that do not exist."""
    try:
        text = (ROOT / path).read_text()
    except UnicodeDecodeError:
        return []
    named = set(DOTTED.findall(text))
    for package, names in IMPORT.findall(text):
        named |= {f"{package}.{name}" for name in names.split(", ")}
    return [
        f"{path}: names {name}, which does not exist"
        for name in sorted(named - MISSPELT)
        if not names_something(name)
    ]


def find_unlisted_files(paths: list[Path]) -> list[str]:
    """Rooms whose ``__init__.py`` does not list exactly the files that lie in them."""
    rooms: dict[Path, set[str]] = {}
    for path in paths:
        if path.suffix == ".py" and path.parts[0] in PRODUCT and len(path.parts) == 4:
            rooms.setdefault(path.parent, set()).add(path.stem)
    faults = []
    for room, stems in sorted(rooms.items()):
        listed = LISTED.findall((ROOT / room / "__init__.py").read_text())
        inside = stems - {"__init__", "__main__"}
        if sorted(listed) != sorted(inside):
            wrong = ", ".join(sorted(inside.symmetric_difference(listed)))
            faults.append(f"{room}/__init__.py: its list and the folder differ: {wrong}")
    return faults


def find_dead_mentions(path: Path) -> list[str]:
    return [
        f"{path}: names {name}, which does not exist"
        for name in sorted(set(MENTION.findall((ROOT / path).read_text())))
        if not (ROOT / name).exists()
    ]


def main() -> int:
    paths = list_files()
    faults = find_layout_faults(paths)
    faults += find_unlisted_files(paths)
    for path in paths:
        faults += find_dead_modules(path)
        if path != SELF:
            faults += find_machine_names(path)
        if path.suffix == ".py" and path.parts[0] in PRODUCT:
            faults += find_long_code(path)
        if path.suffix == ".py" and path.parts[0] in SUMMARISED:
            faults += find_riddles(path)
        if path.suffix == ".md":
            faults += find_dead_mentions(path)
    print("\n".join(faults) or f"{len(paths)} files keep the rules of the tree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
