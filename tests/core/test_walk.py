"""What the pages say of the code exists: rooms, the walk, the answers to a newcomer."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "mainstay_core": "core",
    "mainstay_fork": "core",
    "mainstay_net": "core",
    "mainstay_agent": "agent",
    "mainstay_train": "agent",
    "mainstay_api": "api",
    "mainstay_operator": "operator",
    "mainstay_cli": "cli",
}
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
WALK = ARCHITECTURE.partition("## A walk")[2]
QUESTIONS = (ROOT / "CONTRIBUTING.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


@cache
def list_definitions(path: Path) -> frozenset[str]:
    """Functions, classes and constants of one module, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(found)


def find_definition(dotted: str) -> Path | None:
    """Return the module that defines a dotted name; None if nothing has that name."""
    parts = dotted.split(".")
    base = ROOT / FOLDERS.get(parts[0], "")
    for end in range(len(parts) - 1, 0, -1):
        path = base.joinpath(*parts[:end])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module.is_file() and ".".join(parts[end:]) in list_definitions(module):
            return module
    return None


def room_of(module: Path) -> Path:
    """Return the room that a module lies in; a package without rooms is one."""
    inside = module.relative_to(ROOT).parts[:-1]
    return Path(*inside[:3])


def first_sentence(package: Path) -> str:
    """Return what a room says of itself: the first sentence of its docstring."""
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return " ".join(doc.partition("\n\n")[0].split()).replace("``", "`")


def list_rooms(package: str) -> dict[str, str]:
    """Rooms of a package and their sentences."""
    inside = ROOT / FOLDERS[package] / package
    return {p.parent.name: first_sentence(p.parent) for p in sorted(inside.glob("*/__init__.py"))}


def list_rows(package: str) -> list[tuple[int, str, str]]:
    """Return (level, room, sentence) as the page's table of a package has them."""
    table = ARCHITECTURE.partition(f"### Rooms of `{package}`")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (\d+) \| `(\w+)/?` \| (.+) \|$", table, re.MULTILINE)
    return [(int(level), room, sentence) for level, room, sentence in rows]


def rows_of(text: str) -> list[str]:
    """Items of a numbered list."""
    return re.findall(r"^\d+\. .+", text, re.MULTILINE)


def layers_of(package: str) -> list[set[str]]:
    """Rooms by level, the highest first, as the import contract of a package has them."""
    (contract,) = [
        c for c in CONTRACTS if c["type"] == "layers" and c.get("containers") == [package]
    ]
    return [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def test_every_name_of_the_architecture_page_exists() -> None:
    names = re.findall(r"`(mainstay_\w+(?:\.\w+){2,})`", ARCHITECTURE)

    assert len(names) > 20
    assert [name for name in names if find_definition(name) is None] == []


def test_the_walk_names_one_function_in_each_of_its_rooms() -> None:
    names = re.findall(r"^\d+\. `([\w.]+)`", WALK, re.MULTILINE)
    rooms = [room_of(module) for name in names if (module := find_definition(name))]

    assert len(names) == len(rows_of(WALK)) == len(rooms) >= 12
    assert sorted({room for room in rooms if rooms.count(room) > 1}) == []


def test_the_page_has_every_room_with_its_sentence() -> None:
    for package in ("mainstay_core", "mainstay_train", "mainstay_cli"):
        shown = {room: sentence for _, room, sentence in list_rows(package)}

        assert shown == list_rooms(package)


def test_a_room_lists_all_of_its_files_and_no_others() -> None:
    for package in ("mainstay_core", "mainstay_train", "mainstay_cli"):
        for init in sorted((ROOT / FOLDERS[package] / package).glob("*/__init__.py")):
            doc = ast.get_docstring(ast.parse(init.read_text())) or ""
            files = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}

            assert set(re.findall(r"^- ``(\w+)``: ", doc, re.MULTILINE)) == files, init


def test_the_page_puts_rooms_on_the_levels_of_the_import_contracts() -> None:
    for package in ("mainstay_core", "mainstay_train", "mainstay_cli"):
        rows = list_rows(package)
        levels = [{room for at, room, _ in rows if at == level} for level, _, _ in rows]

        assert [level for i, level in enumerate(levels) if level not in levels[:i]] == [
            layer & list_rooms(package).keys() for layer in layers_of(package)
        ]


def test_the_answers_to_a_newcomers_questions_exist() -> None:
    rows = re.findall(
        r"^\| (.+\?) \| `([\w/]+)` \| `([\w/]+\.py)`: `([\w.]+)` \|$", QUESTIONS, re.MULTILINE
    )

    dead = [
        (question, file, name)
        for question, room, file, name in rows
        if not file.startswith(f"{room}/") or name not in list_definitions(ROOT / file)
    ]
    assert len(rows) >= 20
    assert dead == []
