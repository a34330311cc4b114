"""Checks the files that git would carry for what no linter knows.

No file names a package index, a machine's own path or a machine's address; the top-level folders
are no packages (an operator/__init__.py would shadow the standard library's module), and every
package says that it is typed.
"""

from __future__ import annotations

import re
import subprocess
import sys
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
TOP_LEVEL = ("agent", "api", "cli", "core", "operator", "tests")


def list_files() -> list[Path]:
    """Tracked files and those that git would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
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


def main() -> int:
    paths = list_files()
    faults = find_layout_faults(paths)
    for path in paths:
        if path != SELF:
            faults += find_machine_names(path)
    print("\n".join(faults) or f"{len(paths)} files name no index and no machine")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
