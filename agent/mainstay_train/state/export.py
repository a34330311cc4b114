"""``python -m mainstay_train.state.export DIRECTORY TO``: a version for torch's own tools.

Each part of the version becomes a directory of ``torch.distributed.checkpoint`` below ``TO``, with
its metadata as that library writes it (a pickle: whoever reads it has to trust it). Every digest is
checked on the way. Prints one JSON line per part ({part, tensors}).
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

from mainstay_core.base.errors import IntegrityError, MainstayError
from mainstay_core.wire.checkpoint_manifest import parse_name
from mainstay_core.wire.sealed import Keys
from mainstay_train.base import checkpoint_key
from mainstay_train.state.part_files import new_tensor, read_description, read_tensors
from mainstay_train.state.versions import look_at

# One process per part is what we want; the library warns of it at each call.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def export(directory: Path, to: Path, keys: Keys = ()) -> Iterator[dict[str, Any]]:
    """Write the version in ``directory`` below ``to``; yields each part that is written.

    A part is in memory as a whole, as it was on the rank that wrote it.

    Raises:
        IntegrityError: the version is damaged.
        OSError: a file cannot be read or written.
    """
    version, _ = parse_name(directory.name) or (0, "")
    manifest = look_at(directory, version, keys)
    for part in manifest.parts:
        described = read_description(directory, part, version, keys)
        tensors = {stored.name: new_tensor(stored) for stored in described.tensors}
        read_tensors(directory, part, described, tensors)
        target = to / part.name
        target.mkdir(parents=True)
        try:
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(target), no_dist=True)
        except dcp.CheckpointException as error:
            raise OSError(f"{target} cannot be written: {error}") from error
        yield {"part": part.name, "tensors": len(tensors)}


def main() -> int:
    """Export the version in the first argument to the directory in the second."""
    directory, to = sys.argv[1:]
    try:
        for written in export(Path(directory), Path(to), checkpoint_key.read()):
            print(json.dumps(written), flush=True)  # noqa: T201 - its output is its result
    except (MainstayError, OSError) as error:
        what = "is damaged: " if isinstance(error, IntegrityError) else ""
        print(f"{directory} {what}{error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
