"""``python -m mainstay_train.state.convert DIRECTORY``: makes a version one that can be read.

A version of format 1 is written anew in format 2. With a key, a version of format 2 that nobody
has signed is checked as a whole and signed. What it was before is kept beside it as ``.old``.
Prints one JSON line ({done}: what became of it) and exits with 1 if the version is damaged.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, MainstayError
from mainstay_core.wire.checkpoint_manifest import (
    MANIFEST,
    PART,
    TENSORS,
    Manifest,
    PartDescription,
    parse_manifest,
    parse_name,
    part_name,
    version_name,
)
from mainstay_core.wire.sealed import Keys, is_signed, seal
from mainstay_train.base import checkpoint_key
from mainstay_train.state import format_1
from mainstay_train.state.part_files import (
    describe,
    read_description,
    read_small,
    sync,
    write_tensors,
)
from mainstay_train.state.versions import (
    check_digests,
    has_format_1,
    list_part,
    look_at,
    remove,
)

NONCE = "convert"
"""In place of that of a quorum: nobody's vote has anything to do with it."""


def convert(directory: Path, keys: Keys = ()) -> str:
    """Convert or sign the version in ``directory``; returns what was done, in words.

    Raises:
        IntegrityError: the version is damaged. It is left as it is.
        OSError: a file cannot be read or written.
    """
    version, _ = parse_name(directory.name) or (0, "")
    old = directory.with_name(f"{version_name(version)}.old")
    if old.exists() and not directory.exists():
        old.rename(directory)  # an earlier conversion was killed between its two renames
    signs = keys and not has_format_1(directory) and not is_signed(read_small(directory / MANIFEST))
    if (has_format_1(directory) or signs) and old.exists():
        raise IntegrityError(f"{old.name} is there from an earlier conversion; delete it first")
    if not (has_format_1(directory) or signs):
        return "nothing to do"
    write, done = (_sign, "signed") if signs else (_write_anew, "converted")
    try:
        write(directory, version, keys)
    except BaseException:
        with contextlib.suppress(OSError):  # a disk that is full has room again
            remove(_attempt_of(directory, version))
        raise
    directory.rename(old)
    _attempt_of(directory, version).rename(directory)
    sync(directory.parent)
    return f"{done}; {old.name} is what it was, and can be deleted"


def _attempt_of(directory: Path, version: int) -> Path:
    return directory.with_name(f"{version_name(version)}.tmp-{NONCE}")


def _write_anew(directory: Path, version: int, keys: Keys) -> None:
    old = format_1.read_manifest(directory)
    if old.version != version:
        raise IntegrityError(f"the manifest is of step {old.version}")
    attempt = _begin(directory, version)
    for stage, inner in old.places():
        name = part_name(stage, inner)
        part, tensors = format_1.read_part(directory / name)
        if part.version != version:
            raise IntegrityError(f"{name} is of step {part.version}")
        (attempt / name).mkdir()
        description = PartDescription(
            version=version,
            nonce=NONCE,
            stage=stage,
            inner=inner,
            commit=part.commit,
            commit_chain=part.chain,
            file=write_tensors(attempt / name / TENSORS, list(tensors.values())),
            tensors=tuple(describe(n, tensor) for n, tensor in tensors.items()),
        )
        _write_part(attempt / name, description, keys)
    manifest = Manifest(
        version=version,
        lineage=old.lineage,
        job=old.job,
        parts=(),
        identity=old.identity,
        fingerprint=old.fingerprint,
        created_at_s=old.created_at_s,
    )
    _write_manifest(attempt, manifest, old.places(), keys)


def _sign(directory: Path, version: int, keys: Keys) -> None:
    manifest = look_at(directory, version)
    check_digests(directory, manifest)
    attempt = _begin(directory, version)
    for part in manifest.parts:
        (attempt / part.name).mkdir()
        tensors = directory / part.name / TENSORS
        try:
            os.link(tensors, attempt / part.name / TENSORS)
        except OSError:  # a storage without links
            shutil.copyfile(tensors, attempt / part.name / TENSORS)
        described = read_description(directory, part, version)
        _write_part(attempt / part.name, replace(described, nonce=NONCE), keys)
    places = [(part.stage, part.inner) for part in manifest.parts]
    _write_manifest(attempt, manifest, places, keys)


def _begin(directory: Path, version: int) -> Path:
    attempt = _attempt_of(directory, version)
    with contextlib.suppress(FileNotFoundError):
        remove(attempt)
    attempt.mkdir()
    return attempt


def _write_part(directory: Path, description: PartDescription, keys: Keys) -> None:
    (directory / PART).write_bytes(seal(PART, codec.dumps(description), keys))
    for path in (directory / TENSORS, directory / PART, directory):
        sync(path)


def _write_manifest(
    attempt: Path, manifest: Manifest, places: Sequence[tuple[int, int]], keys: Keys
) -> None:
    parts = [list_part(attempt, manifest.version, NONCE, place, keys) for place in places]
    chains = {described.commit_chain for _, described in parts}
    if len(chains) != 1:
        raise IntegrityError("the parts are of different commits")
    listed = tuple(part for part, _ in parts)
    manifest = replace(manifest, parts=listed, commit_chain=chains.pop())
    data = seal(MANIFEST, codec.dumps(manifest), keys)
    (attempt / MANIFEST).write_bytes(data)
    sync(attempt / MANIFEST)
    sync(attempt)
    check_digests(attempt, parse_manifest(data, manifest.version, keys), keys)


def main() -> int:
    """Convert or sign the version in the directory that is the only argument."""
    (directory,) = sys.argv[1:]
    try:
        done = convert(Path(directory), checkpoint_key.read())
    except (MainstayError, OSError) as error:
        print(f"{directory} is left as it is: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps({"done": done}), flush=True)  # noqa: T201 - its output is its result
    return 0


if __name__ == "__main__":
    sys.exit(main())
