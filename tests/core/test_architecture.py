"""The rules between packages, and that trainers need nothing of core but the standard library."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
(STANDARD_LIBRARY_ONLY,) = [
    set(contract["source_modules"])
    for contract in CONTRACTS
    if "standard library only" in contract["name"]
]


def is_module(name: str) -> bool:
    path = ROOT / "core" / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def list_core_imports(path: Path) -> set[str]:
    """Modules of core that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name) else node.module for name in names}
    return {name for name in found if name.startswith("mainstay_core.")}


def is_held(name: str) -> bool:
    """Whether a module, or a room that it lies in, is held to the standard library."""
    return any(name == held or name.startswith(f"{held}.") for held in STANDARD_LIBRARY_ONLY)


def list_held() -> list[str]:
    """Every module that is held to the standard library, those inside rooms included."""
    files = [
        path.relative_to(ROOT / "core").with_suffix("") for path in (ROOT / "core").rglob("*.py")
    ]
    names = [".".join(path.parts).removesuffix(".__init__") for path in files]
    return sorted(name for name in names if is_held(name))


def test_packages_import_only_what_the_contracts_allow() -> None:
    checked = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_trainers_import_of_core_only_what_is_held_to_the_standard_library() -> None:
    imported = {
        name
        for path in sorted((ROOT / "agent" / "mainstay_train").rglob("*.py"))
        for name in list_core_imports(path)
    }

    assert imported
    assert {name for name in imported if not is_held(name)} == set()


def test_what_trainers_import_of_core_loads_without_any_installed_package() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'core')!r})\n" + "\n".join(
        f"import {name}" for name in list_held()
    )

    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )

    assert loaded.returncode == 0, loaded.stderr
