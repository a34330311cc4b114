"""Damages a directory of checkpoints at random, and looks what a reader makes of it.

``look(root, seed)`` is one case: the same seed makes the same damage.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import torch
from tests.train.state.test_directory import make_states, open_directory, write

from mainstay_core.base.errors import IntegrityError
from mainstay_core.wire.sealed import Keys, seal, unseal
from mainstay_train.exact.optimizer import StageState
from mainstay_train.state import verify

VERSIONS = (5, 10, 15)
SEALED = ("manifest", "part")
NUMBERS = (-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1.5, float("nan"), float("inf"), True)
TEXTS = ("", "../../etc/passwd", "\ud800", "\x00", "x" * 5000, "float32", "master:", "step-1")

Tensors = dict[str, torch.Tensor]


def tensors_of(states: list[StageState]) -> Tensors:
    return {t.id: t.tensor.clone() for state in states for t in state.state_tensors()}


def write_versions(root: Path, keys: Keys = ()) -> dict[int, Tensors]:
    """Write three versions of two stages; returns what their tensors are."""
    written = {}
    for version in VERSIONS:
        states = make_states(2, seed=version)
        write(open_directory(root, keep=len(VERSIONS), keys=keys), version, states)
        written[version] = tensors_of(states)
    return written


def look(root: Path, written: dict[int, Tensors], seed: int) -> str:
    """Damage a directory, then read it as trainers do; returns what was damaged.

    Whatever the damage: a version that is loaded has the tensors that were written, and a damaged
    one is refused with a documented error, so that the next older one is found.
    """
    told = damage(root, random.Random(seed))
    newest, loaded = read(root, told)
    expected = written.get(newest, {})
    assert all(torch.equal(loaded[name], expected[name]) for name in expected), told
    return told


def read(root: Path, told: str, keys: Keys = ()) -> tuple[int, Tensors]:
    """Return the version that a trainer loads, 0 for none, and its tensors."""
    for path in root.glob("step-????????"):
        list(verify.verify(path, keys))
    states = make_states(1)
    for _ in range(2 * len(VERSIONS)):
        # Anew each time: every look of another rank must come to the same.
        directory = open_directory(root, keys=keys)
        newest, skipped = directory.look()
        assert all(s.why.isprintable() and len(s.why) < 1000 for s in skipped), told
        if newest is None:
            return 0, {}
        try:
            directory.load(newest.version, states[0])
        except IntegrityError:
            continue
        except OSError as error:
            raise AssertionError(f"{told}: {error}") from error
        return newest.version, tensors_of(states)
    raise AssertionError(f"{told}: a damaged version is chosen again and again")


def forge(root: Path, seed: int) -> str:
    """Change a value of a part, and make the manifest fit: what somebody without a key can do."""
    draw = random.Random(seed)
    part = draw.choice(sorted(root.rglob("part")))
    data = json.loads(unseal(part.read_bytes(), "part"))
    _change(data, draw)
    try:
        content = seal("part", json.dumps(data, ensure_ascii=draw.random() < 0.9))
    except UnicodeEncodeError:
        return "nothing"
    part.write_bytes(content)
    path = part.parent.parent / "manifest"
    manifest = json.loads(unseal(path.read_bytes(), "manifest"))
    for entry in manifest["parts"]:
        if part.parent.name == f"stage-{entry['stage']}-inner-{entry['inner']}":
            sha256 = hashlib.sha256(content).hexdigest()
            entry["part"] = {"size_bytes": len(content), "sha256": sha256}
            entry["tensors"] = data.get("file", entry["tensors"])
    path.write_bytes(seal("manifest", json.dumps(manifest)))
    return f"forged {part.relative_to(root)}"


def damage(root: Path, draw: random.Random) -> str:
    """Do one to three things to the files of a directory; returns which."""
    return "; ".join(_damage_once(root, draw) for _ in range(draw.randint(1, 3)))


def _damage_once(root: Path, draw: random.Random) -> str:
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink())
    if not files:
        return "nothing left"
    victim, other = draw.choice(files), draw.choice(files)
    kinds = (_flip, _shorten, _extend, _zero, _swap, _copy, _remove, _replace, _rename, _rewrite)
    kind = draw.choice((*kinds, _rewrite, _rewrite))
    with contextlib.suppress(OSError):  # what an earlier damage has left
        kind(victim, other, draw)
    return f"{kind.__name__} {victim.relative_to(root)} {other.relative_to(root)}"


def _flip(victim: Path, other: Path, draw: random.Random) -> None:
    content = bytearray(victim.read_bytes())
    for _ in range(draw.choice((1, 1, 2, 50))):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    victim.write_bytes(content)


def _shorten(victim: Path, other: Path, draw: random.Random) -> None:
    content = victim.read_bytes()
    victim.write_bytes(content[: draw.randrange(len(content) + 1)])


def _extend(victim: Path, other: Path, draw: random.Random) -> None:
    victim.write_bytes(victim.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def _zero(victim: Path, other: Path, draw: random.Random) -> None:
    content = bytearray(victim.read_bytes())
    start = draw.randrange(len(content) + 1)
    content[start:] = bytes(len(content) - start)
    victim.write_bytes(content)


def _swap(victim: Path, other: Path, draw: random.Random) -> None:
    first, second = victim.read_bytes(), other.read_bytes()
    victim.write_bytes(second)
    other.write_bytes(first)


def _copy(victim: Path, other: Path, draw: random.Random) -> None:
    victim.write_bytes(other.read_bytes())


def _remove(victim: Path, other: Path, draw: random.Random) -> None:
    if draw.random() < 0.3:
        shutil.rmtree(victim.parent)
    else:
        victim.unlink()


def _replace(victim: Path, other: Path, draw: random.Random) -> None:
    victim.unlink()
    match draw.randrange(5):
        case 0:
            victim.mkdir()
        case 1:
            os.mkfifo(victim)
        case 2:
            victim.symlink_to(victim)
        case 3:
            victim.symlink_to("/dev/zero")
        case _:
            victim.symlink_to(other)


def _rename(victim: Path, other: Path, draw: random.Random) -> None:
    target = draw.choice((other.parent, victim.parent.with_name(f"step-{draw.randrange(99):08d}")))
    victim.parent.rename(target if not target.exists() else target.with_name("stage-7-inner-0"))


def _rewrite(victim: Path, other: Path, draw: random.Random) -> None:
    """Change a value in a sealed file and seal it anew: what somebody does, not a disk."""
    if victim.name not in SEALED:
        return
    try:
        data = json.loads(unseal(victim.read_bytes(), victim.name))
    except IntegrityError:
        return
    _change(data, draw)
    body = json.dumps(data, ensure_ascii=draw.random() < 0.9)
    with contextlib.suppress(UnicodeEncodeError):
        victim.write_bytes(seal(victim.name, body))


def _change(data: object, draw: random.Random) -> None:
    """Change one value, at any depth."""
    inner: list[object] = []
    if isinstance(data, dict):
        inner = [v for v in data.values() if isinstance(v, dict | list) and v]
        keys: list[object] = list(data)
    elif isinstance(data, list):
        inner = [v for v in data if isinstance(v, dict | list) and v]
        keys = list(range(len(data)))
    else:
        return
    if inner and draw.random() < 0.7:
        _change(draw.choice(inner), draw)
        return
    key = draw.choice(keys)
    if draw.random() < 0.2:
        del data[key]  # type: ignore[union-attr, arg-type]
    elif draw.random() < 0.2 and isinstance(data, list):
        data.append(draw.choice(data))
    else:
        choices = (*NUMBERS, *TEXTS, None, [], {}, [[]], "0" * 64, "0" * 32)
        data[key] = draw.choice(choices)  # type: ignore[call-overload, index]
