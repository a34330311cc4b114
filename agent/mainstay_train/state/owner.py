"""Claims a directory of checkpoints for a job, and finds out whose it is.

:mod:`mainstay_core.wire.checkpoint_owner` decides; here are the files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from pathlib import Path

from mainstay_core.base import codec
from mainstay_core.base.errors import IntegrityError, OwnershipError
from mainstay_core.wire.checkpoint_manifest import parse_name
from mainstay_core.wire.checkpoint_owner import (
    KEPT_CLAIMS,
    OWNER,
    Claim,
    Owner,
    claim_name,
    judge_claims,
    parse_claim_name,
    parse_owner,
)
from mainstay_core.wire.sealed import seal
from mainstay_train.state.part_files import read_small, sync

logger = logging.getLogger(__name__)

MAX_OWNER_BYTES = 1 << 16
TRIES = 100
"""Claims that others may make while we make ours, one after the other. A storage on which so many
come in between is broken."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""What filesystems without hard links answer."""


def claim(root: Path, me: Owner) -> None:
    """Return once ``root`` is this job's to write to.

    Raises:
        OwnershipError: it is another job's; the message names both.
        OSError: the storage refuses.
    """
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
    root.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        claims = _find_claims(root)
        judged = judge_claims(claims, me)
        if judged.refused:
            raise OwnershipError(
                f"job {me} may not write to {root}: {judged.refused}; give each job a storage of "
                f"its own, or remove {root / OWNER}-* if that job will never run again"
            )
        if judged.take == 0:
            return
        if _take(root, judged.take, me):
            logger.info("%s is claimed for job %s", root, me)
            _forget(root, [c.generation for c in claims])
            return
    raise OSError(errno.EBUSY, "others claim the directory again and again", str(root))


def has_versions_of_others(root: Path, me: Owner) -> bool:
    """Return whether a directory has complete versions, and its newest claim is not this job's.

    Raises:
        OSError: the storage refuses.
    """
    names = [parse_name(path.name) for path in root.iterdir()] if root.is_dir() else []
    return any(named and named[1] == "" for named in names) and not _is_claimed(root, me)


def _is_claimed(root: Path, me: Owner) -> bool:
    claims = _find_claims(root)
    newest = max(claims, key=lambda c: c.generation, default=None)
    return newest is not None and newest.owner is not None and newest.owner.uid == me.uid


def _find_claims(root: Path) -> list[Claim]:
    found = []
    for path in root.iterdir():
        generation = parse_claim_name(path.name)
        if generation is not None:
            with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile
                found.append(Claim(generation, _read(path)))
    return found


def _read(path: Path) -> Owner | None:
    try:
        return parse_owner(read_small(path, MAX_OWNER_BYTES))
    except IntegrityError as error:
        logger.warning("%s says nothing: %s", path, error)
        return None


def _take(root: Path, generation: int, me: Owner) -> bool:
    """Make the claim's file with its content, atomically; False if another one is there."""
    final = root / claim_name(generation)
    draft = root / f".{OWNER}-{secrets.token_hex(6)}"
    data = seal(OWNER, codec.dumps(me))
    try:
        draft.write_bytes(data)
        sync(draft)
        try:
            os.link(draft, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create(final, data)
    finally:
        draft.unlink(missing_ok=True)
    sync(root)
    return True


def _create(final: Path, data: bytes) -> bool:
    try:
        with final.open("xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    sync(final)
    return True


def _forget(root: Path, generations: list[int]) -> None:
    for generation in sorted(generations)[: -KEPT_CLAIMS or None]:
        with contextlib.suppress(OSError):  # another rank was first
            (root / claim_name(generation)).unlink()
