"""``python -m mainstay_agent.install FOLDER``: give a trainer our package.

The init container of a training pod runs this in our image: the trainer's own image
need not hold ``mainstay_train``, and both always have one version. Only our own
packages are copied, and none of what the supervisor needs besides, so nothing
of the user's image is replaced.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("mainstay_core", "mainstay_fork", "mainstay_net", "mainstay_train")
EXIT_USAGE = 2


def install(folder: Path) -> None:
    """Copy what trainers import into ``folder``; what an earlier try left is replaced.

    Raises:
        OSError: it cannot be written, or a package is not here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(f"{name} is not in this image")
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        # Another Python's bytecode would only take room.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(spec.submodule_search_locations[0], target, ignore=ignored)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install and return the exit code: 0, 1 when it failed, 2 for bad usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or given[0].startswith("-"):
        sys.stderr.write("usage: python -m mainstay_agent.install FOLDER\n")
        return EXIT_USAGE
    try:
        install(Path(given[0]))
    except OSError as error:
        sys.stderr.write(f"mainstay_agent.install: {error}\n")
        return 1
    sys.stdout.write(f"{', '.join(PACKAGES)} are in {given[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
