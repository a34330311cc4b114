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


def list_core_imports(path: Path) -> set[str]:
    """Modules of core that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "mainstay_core":
            found |= {f"mainstay_core.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.startswith("mainstay_core.")}


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
    assert imported - STANDARD_LIBRARY_ONLY == set()


def test_what_trainers_import_of_core_loads_without_any_installed_package() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'core')!r})\n" + "\n".join(
        f"import {name}" for name in sorted(STANDARD_LIBRARY_ONLY)
    )

    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )

    assert loaded.returncode == 0, loaded.stderr
