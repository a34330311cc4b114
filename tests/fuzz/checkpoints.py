"""Fuzzes directories of checkpoints: damage of a disk, and forgeries of somebody without a key.

An input is a line: ``damage 17``, ``forge 17`` or ``signed 17``. The number is the seed from which
:mod:`tests.train.state.damage` draws what is done to the directory.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.train.state import damage

KEY = b"a key of sixteen bytes or more"
KINDS = ("damage", "forge", "signed")


class Checkpoints:
    """Directories of checkpoints, damaged and forged."""

    name = "checkpoints"

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="mainstay-fuzz-", dir=place)
        self._root = Path(self._folder.name)
        self._written = damage.write_versions(self._root / "plain")
        self._signed = damage.write_versions(self._root / "signed", [KEY])

    def examples(self) -> list[bytes]:
        return [b"whole 0"]

    def make(self, draw: random.Random) -> bytes:
        return f"{draw.choice(KINDS)} {draw.randrange(1 << 40)}".encode()

    def judge(self, data: bytes) -> bool:
        kind, _, number = data.decode(errors="replace").strip().partition(" ")
        seed = int(number)
        signed = kind == "signed"
        copy = self._root / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._root / ("signed" if signed else "plain"), copy)
        match kind:
            case "damage":
                damage.look(copy, self._written, seed)
                return False
            case "forge":
                damage.read(copy, damage.forge(copy, seed))
                return False
            case "signed":
                told = damage.forge(copy, seed)
                newest, loaded = damage.read(copy, told, [KEY])
                _check_same(loaded, self._signed.get(newest, {}), told)
                return False
        newest, loaded = damage.read(copy, "nothing")
        assert newest == damage.VERSIONS[-1]
        _check_same(loaded, self._written[newest], "nothing")
        return True

    def smaller(self, data: bytes) -> Iterator[bytes]:
        del data
        yield from ()


def _check_same(loaded: damage.Tensors, expected: damage.Tensors, told: str) -> None:
    assert all(torch.equal(loaded[name], expected[name]) for name in expected), told


TARGET = Checkpoints
