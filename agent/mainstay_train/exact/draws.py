"""Random numbers by address (design.md section 1, rule 5).

A running generator would make a draw depend on what was drawn before, hence on
which rank computed what. Here every draw names its place, and equal places draw
equal numbers on any rank, in a replay, in a check.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mainstay_train.base import device as devices


def hash64(*parts: int | str) -> int:
    """An unsigned 64-bit BLAKE2b hash of integers and strings, each framed by its kind."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, int):
            digest.update(b"i" + part.to_bytes(16, "little", signed=True))
        else:
            encoded = part.encode()
            digest.update(b"s" + struct.pack("<I", len(encoded)) + encoded)
    return int.from_bytes(digest.digest(), "little")


def generator_of(*parts: int | str) -> torch.Generator:
    """A fresh CPU generator seeded with the hash of its address."""
    generator = torch.Generator(device="cpu")
    generator.manual_seed(hash64(*parts))
    return generator


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a forward or backward in the run: all that its bits may depend on,
    besides the parameters.

    Attributes:
        seed: ``training.seed`` of the job.
        step: Number of the optimizer step, from 0.
        type: Shard type.
        micro_batch: Index of the micro-batch within the type.
    """

    seed: int
    step: int
    type: int
    micro_batch: int

    def hash64(self, site: str) -> int:
        """An unsigned 64-bit number for ``site`` at this address."""
        return hash64(self.seed, self.step, self.type, self.micro_batch, site)

    def generator(self, site: str) -> torch.Generator:
        """A fresh CPU generator for ``site``, e.g. "layers.3.attention.dropout".

        CPU always: draws must not differ between devices.
        """
        return generator_of(self.seed, self.step, self.type, self.micro_batch, site)

    def uniform(
        self, shape: Sequence[int], site: str, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """fp32 numbers uniform in [0, 1), of ``shape``, drawn on CPU and moved to ``device``."""
        drawn = torch.rand(tuple(shape), generator=self.generator(site), dtype=torch.float32)
        return devices.sent(drawn, torch.device(device))
