"""Compiles and checks the lock: one hashed requirements file per extra.

A lock file names versions and hashes, never where they come from: no index, no URL, no path of
the machine that compiled it. Its first line carries a digest of the tables of pyproject.toml that
it was compiled from, so that a check needs no network.

Usage: python scripts/lock.py [--check]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"

# What to compile into which file. `dev` is everything that the tests need; `uv` is what installs
# the rest, small enough for pip.
SOURCES: dict[str, tuple[str, ...]] = {
    "api": ("--extra", "api"),
    "agent": ("--extra", "agent"),
    "train": ("--extra", "train"),
    "cli": ("--extra", "cli"),
    "local": ("--extra", "local"),
    "operator": ("--extra", "operator"),
    "kubectl": ("--extra", "kubectl"),
    "dev": ("--extra", "local", "--extra", "operator", "--group", "dev"),
}
BOOTSTRAP = "uv"

OPTIONS = (
    "--universal",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-header",
    "--no-annotate",
    "--quiet",
)

REQUIREMENT = re.compile(r"^([a-z0-9][a-z0-9._-]*)==\S+( ; .+?)? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")


def digest_inputs() -> str:
    """The digest of everything in pyproject.toml that decides what a lock contains."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inputs = [
        project["project"]["requires-python"],
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        project["dependency-groups"],
        project["tool"]["uv"],
        SOURCES,
    ]
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def format_lock(compiled: str) -> str:
    return f'# Made by "make lock" from pyproject.toml, inputs {digest_inputs()}\n{compiled}'


def compile_lock(arguments: tuple[str, ...], constraint: Path | None) -> str:
    """Runs uv; a constraint keeps every file on the versions of the widest one."""
    extra = () if constraint is None else ("--constraint", str(constraint))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock.txt"
        command = ["uv", "pip", "compile", *arguments, *OPTIONS, *extra, "--output-file", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return out.read_text()


def find_complaints(name: str, text: str) -> list[str]:
    """What is wrong with a lock file's text; nothing means that it may be installed from."""
    first, _, body = text.partition("\n")
    complaints = []
    if not first.endswith(f"inputs {digest_inputs()}"):
        complaints.append("was not compiled from this pyproject.toml: run make lock")
    for number, line in enumerate(body.splitlines(), 2):
        requirement = REQUIREMENT.match(line)
        if requirement is None and HASH.match(line) is None:
            complaints.append(f"line {number} is neither a pinned requirement nor a hash: {line}")
        # The name on the public index is not ours: to install it would run a stranger's code.
        if requirement is not None and requirement[1] == "mainstay":
            complaints.append(f"line {number} takes this project from an index")
    return [f"requirements/{name}.txt {complaint}" for complaint in complaints]


def check_locks() -> int:
    names = [*SOURCES, BOOTSTRAP]
    complaints = []
    for name in names:
        path = FOLDER / f"{name}.txt"
        text = path.read_text() if path.exists() else ""
        complaints += find_complaints(name, text)
    strays = sorted(path.name for path in FOLDER.iterdir() if path.stem not in names)
    complaints += [f"requirements/{name} belongs to no extra" for name in strays]
    print("\n".join(complaints) or f"{len(names)} lock files match pyproject.toml")
    return 1 if complaints else 0


def write_locks() -> int:
    FOLDER.mkdir(exist_ok=True)
    widest = FOLDER / "dev.txt"
    for name in ("dev", *(name for name in SOURCES if name != "dev")):
        constraint = None if name == "dev" else widest
        compiled = compile_lock(("pyproject.toml", *SOURCES[name]), constraint)
        (FOLDER / f"{name}.txt").write_text(format_lock(compiled))
    with tempfile.NamedTemporaryFile("w", suffix=".in") as request:
        request.write("uv\n")
        request.flush()
        (FOLDER / f"{BOOTSTRAP}.txt").write_text(format_lock(compile_lock((request.name,), widest)))
    return check_locks()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compile nothing, only compare")
    return check_locks() if parser.parse_args().check else write_locks()


if __name__ == "__main__":
    sys.exit(main())
