"""A target with faults that the runner must find; ``python -m tests.fuzz.planted FOLDER`` runs it.

It is a program of its own since its faults end a process, or fill its memory.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import runner
from tests.fuzz.mutation import smaller_bytes

WORDS = (b"good", b"raise", b"die", b"eat", b"loop")


class Planted:
    """Words, some of which are orders to do harm."""

    name = "planted"

    def examples(self) -> list[bytes]:
        return [b"good"]

    def make(self, draw: random.Random) -> bytes:
        return draw.randbytes(draw.randrange(30)) + draw.choice(WORDS) + draw.randbytes(5)

    def judge(self, data: bytes) -> bool:
        if b"raise" in data:
            raise ZeroDivisionError("planted")
        if b"die" in data:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"eat" in data:
            bytearray(64 << 20)
        while b"loop" in data:
            pass
        return b"good" in data

    def smaller(self, data: bytes) -> Iterator[bytes]:
        return smaller_bytes(data)


def load(name: str) -> runner.Target:
    """Return the target."""
    assert name == "planted"
    return Planted()


def main() -> None:
    bounds = runner.Bounds(cpu_s=0.1, growth_mib=16)
    task = runner.Task(
        target="planted", load=load, seed=1, first=0, step=1, stop=60, seconds=600, bounds=bounds
    )
    print(runner.run(task, 2, sys.stderr.write, Path(sys.argv[1])))  # noqa: T201


if __name__ == "__main__":
    main()
