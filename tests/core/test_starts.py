"""The page lists every place that starts a process; nothing forks where threads may hold locks."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.core.test_walk import ARCHITECTURE, FOLDERS, ROOT

STARTS = re.compile(
    r"subprocess\.(Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|(torch\.)?multiprocessing\.(?!connection\b|Pipe\b|reductions\.StorageWeakRef\b)[\w.]+"
    r"|os\.(fork|posix_spawn|spawn|exec|system|popen)\w*|(_posixsubprocess|pty)\.\w+"
    r"|concurrent\.futures\.(process\.)?ProcessPoolExecutor"
    r"|asyncio\.(subprocess\.)?create_subprocess_\w+|.+\.subprocess_(exec|shell)"
    r"|anyio\.(run_process|open_process|to_process\..+)"
)
"""What starts a process, by its name in the libraries."""
HINTS = re.compile(
    r"subprocess|multiprocessing|ProcessPool|fork|spawn|exec[lv]|system|popen|pty|anyio"
)
"""A module without these words starts nothing: it need not be parsed, which takes long."""
FORKS = re.compile(r"os\.fork\w*|pty\.\w+|(torch\.)?multiprocessing\.(Process|Pool|Manager)")
"""What copies this process and goes on in Python."""


@dataclass(frozen=True)
class Start:
    """A place of the code that names what starts a process, whether it calls it or hands it on."""

    where: str
    what: str
    call: ast.Call | None

    @property
    def options(self) -> dict[str, str]:
        keywords = self.call.keywords if self.call else []
        return {str(keyword.arg): ast.unparse(keyword.value) for keyword in keywords}

    @property
    def forks(self) -> bool:
        """Whether it copies the threads' locks, or may where ``fork`` is what is usual."""
        if self.what.endswith("get_context"):
            safe = ("'spawn'", "'forkserver'")
            return not self.call or [*map(ast.unparse, self.call.args)] not in [[s] for s in safe]
        if self.what.endswith("ProcessPoolExecutor"):
            return "mp_context" not in self.options
        return bool(FORKS.fullmatch(self.what)) or "preexec_fn" in self.options


@dataclass
class Reader(ast.NodeVisitor):
    """Finds the starts of a module. What annotations name is no start."""

    module: str
    names: dict[str, str] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    called: dict[ast.expr, ast.Call] = field(default_factory=dict)
    found: list[Start] = field(default_factory=list)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.names[name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        node.returns = None
        self._enter(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        node.returns = None
        self._enter(node)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.called[node.func] = node
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._note(node):
            self.generic_visit(node)

    def _note(self, node: ast.Name | ast.Attribute) -> bool:
        what = self._name(node)
        if STARTS.fullmatch(what):
            where = ".".join([self.module, *self.inside])
            self.found.append(Start(where, what, self.called.get(node)))
            return True
        return False

    def _name(self, node: ast.expr) -> str:
        """Dotted, as in the libraries; of what is no name only the attributes."""
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        return self.names.get(node.id, node.id) if isinstance(node, ast.Name) else "()"

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.inside.append(node.name)
        self.generic_visit(node)
        self.inside.pop()


def read_starts(base: Path, folder: Path) -> Iterator[Start]:
    """The starts of all modules in a folder, which are named from ``base``."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        if HINTS.search(text):
            reader = Reader(".".join(path.relative_to(base).with_suffix("").parts))
            reader.visit(ast.parse(text))
            yield from reader.found


@pytest.fixture(scope="module")
def ours() -> list[Start]:
    """The starts of all packages: read here, as every worker imports this module."""
    return [
        start
        for package, folder in FOLDERS.items()
        for start in read_starts(ROOT / folder, ROOT / folder / package)
    ]


def test_the_page_lists_every_place_that_starts_a_process_and_no_other(ours: list[Start]) -> None:
    section = ARCHITECTURE.partition("## What starts processes")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(mainstay_[\w.]+)` \|", section, re.MULTILINE)

    assert sorted(listed) == sorted({start.where for start in ours})


def test_one_place_forks_and_the_others_begin_a_program_anew(ours: list[Start]) -> None:
    """That the one place refuses a process with threads: tests/train/launcher/test_launcher.py."""
    forking = [start.where for start in ours if start.forks]

    assert forking == ["mainstay_fork.children.fork"]


def test_of_tests_and_benchmarks_only_make_fuzz_forks() -> None:
    """Their processes have threads: of stores, of servers, of libraries."""
    folders = ("benchmarks", "examples", "scripts", "tests")
    starts = [start for folder in folders for start in read_starts(ROOT, ROOT / folder)]

    # make fuzz is a program of its own, which has one thread when its workers begin.
    forking = [start.where for start in starts if start.forks]
    assert forking == ["tests.fuzz.runner.Worker.__init__"]


@pytest.mark.parametrize(
    ("code", "forks"),
    [
        ("import subprocess as s\nasync def f():\n    await to_thread(s.run, [])", False),
        ("import subprocess\ndef f():\n    subprocess.Popen([], preexec_fn=print)", True),
        ("from os import fork as g\ndef f():\n    g()", True),
        ("import os\nclass f:\n    start = os.fork", True),
        ("import multiprocessing as m\ndef f():\n    m.Process(target=print)", True),
        ("import multiprocessing as m\ndef f():\n    m.get_context()", True),
        ("import multiprocessing as m\ndef f():\n    m.get_context('fork')", True),
        ("from torch import multiprocessing as m\ndef f():\n    m.get_context('spawn')", False),
        ("from concurrent import futures\ndef f():\n    futures.ProcessPoolExecutor(2)", True),
        ("def f(loop):\n    loop.subprocess_exec(None)", False),
    ],
)
def test_a_start_is_found_however_it_is_written(code: str, forks: bool, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    (start,) = read_starts(tmp_path, tmp_path)

    assert (start.where, start.forks) == ("module.f", forks)


def test_a_name_in_an_annotation_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import subprocess\n"
        "child: subprocess.Popen[bytes] | None = None\n"
        "def f(child: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:\n"
        "    return child if child.wait(subprocess.PIPE) else child\n"
    )

    assert [*read_starts(tmp_path, tmp_path)] == []
