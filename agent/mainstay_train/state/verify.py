"""``python -m mainstay_train.state.verify DIRECTORY``: every digest of a version, anew.

Prints one JSON line per part ({part, tensors, size_bytes, problems}) and exits with 1 when
there is a problem. It never changes what it reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.checkpoint_manifest import MANIFEST, parse_manifest
from mainstay_train.exact import digests
from mainstay_train.state.directory import (
    problem_of,
    read_description,
    read_tensors,
    stored_tensors,
)


def verify(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield what was found of each part of the version in ``directory``."""
    try:
        manifest = parse_manifest((directory / MANIFEST).read_text())
        torn = problem_of(directory, manifest)
    except (OSError, IntegrityError) as error:
        yield {"part": "", "tensors": 0, "size_bytes": 0, "problems": [str(error)]}
        return
    if torn is not None:
        yield {"part": "", "tensors": 0, "size_bytes": 0, "problems": [torn]}
    for name in manifest.parts:
        part = directory / name
        sizes = [size for file, size in manifest.files.items() if file.startswith(f"{name}/")]
        found: dict[str, Any] = {"part": name, "tensors": 0, "size_bytes": sum(sizes)}
        try:
            found["tensors"], found["problems"] = _verify_part(part)
        except IntegrityError as error:
            found["problems"] = [str(error)]
        yield found


def _verify_part(part: Path) -> tuple[int, list[str]]:
    """Number of tensors that were looked at, and what is wrong with which.

    Tensors are read one at a time: a version may be larger than the memory.
    """
    expected, _, _ = read_description(part)
    stored = stored_tensors(part)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - stored.keys())]
    problems += [f"{name} has no digest" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        try:
            tensor = {name: stored.pop(name)}
            read_tensors(part, tensor)
        except IntegrityError as error:
            problems.append(f"{name}: {error}")
            continue
        digest = digests.tensor_digest(name, tensor[name]).hex()
        if digest != expected[name]:
            problems.append(f"{name} has digest {digest}, not {expected[name]}")
    return len(expected), problems


def main() -> int:
    """Verify the version in the directory that is the only argument."""
    (directory,) = sys.argv[1:]
    sound = True
    for found in verify(Path(directory)):
        print(json.dumps(found), flush=True)  # noqa: T201 - its output is its result
        sound = sound and not found["problems"]
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
