"""``python -m mainstay_train.state.verify DIRECTORY``: every digest of a version, anew.

Prints one JSON line per part ({part, tensors, size_bytes, problems}) and exits with 1 when
there is a problem. It never changes what it reads, and reads every byte once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.checkpoint_manifest import ManifestPart, parse_name
from mainstay_core.wire.sealed import Keys
from mainstay_train.base import checkpoint_key
from mainstay_train.state.part_files import new_tensor, read_description, walk_tensors
from mainstay_train.state.versions import look_at, reason_of
from mainstay_train.sums import digests


def verify(directory: Path, keys: Keys = ()) -> Iterator[dict[str, Any]]:
    """Yield what was found of each part of the version in ``directory``."""
    version, _ = parse_name(directory.name) or (0, "")
    try:
        manifest = look_at(directory, version, keys)
    except IntegrityError as error:
        yield {"part": "", "tensors": 0, "size_bytes": 0, "problems": [str(error)]}
        return
    for part in manifest.parts:
        size_bytes = part.part.size_bytes + part.tensors.size_bytes
        problems: list[str] = []
        num_tensors = _verify_part(directory, part, version, keys, problems)
        yield {
            "part": part.name,
            "tensors": num_tensors,
            "size_bytes": size_bytes,
            "problems": problems,
        }


def _verify_part(
    directory: Path, part: ManifestPart, version: int, keys: Keys, problems: list[str]
) -> int:
    """Number of tensors that were looked at; what is wrong with which is added to ``problems``.

    Tensors are read one at a time: a version may be larger than the memory.
    """
    count = 0
    try:
        described = read_description(directory, part, version, keys)
        for stored, tensor in walk_tensors(directory, part, described, new_tensor):
            assert tensor is not None
            count += 1
            digest = digests.tensor_digest(stored.name, tensor).hex()
            if digest != stored.digest:
                problems.append(f"{stored.name} has digest {digest}, not {stored.digest}")
    except IntegrityError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(reason_of(error, directory))
    return count


def main() -> int:
    """Verify the version in the directory that is the only argument."""
    (directory,) = sys.argv[1:]
    sound = True
    for found in verify(Path(directory), checkpoint_key.read()):
        print(json.dumps(found), flush=True)  # noqa: T201 - its output is its result
        sound = sound and not found["problems"]
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
