"""Times what a lost stage costs to load: healed from its own, or made anew of its neighbours.

Three stages have processes that serve their states, one thread each. This process copies over the
heal's transport, as a joiner does: the whole state of the middle stage, from one or two holders; or
the masters of both neighbours, of which it makes the middle stage anew.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from mainstay_core.rank.serving import CopyOrder, Source, Wanted
from mainstay_core.wire.reinitialisation import BlockSource, MadeBlock, MadePosition, SourceKind
from mainstay_train.exact import optimizer
from mainstay_train.exact.optimizer import StageState
from mainstay_train.model import blocks, split
from mainstay_train.state.beside import BesideStates
from mainstay_train.state.heal import HealClient, HealServer
from mainstay_train.sums import digests

ADDRESS = "127.0.0.1"
QUORUM = "q1-bench"
BYTES_PER_ELEMENT = 12
"""Of a state: a master and two moments, in fp32."""
WIDTH = 1024
NUM_BLOCKS = 4
LOST = 1
"""The stage that is healed or made; those beside it are its neighbours."""
HOLDERS = (0, 1, 2, 1)
"""The stage of each serving process."""
NO_DIGEST = ""


def _make_state(stage: int, size_bytes: int) -> StageState:
    rows = max(1, size_bytes // (BYTES_PER_ELEMENT * WIDTH * NUM_BLOCKS))
    made = [
        blocks.Block(
            blocks.BlockSpec(name=_name(stage, i), build=lambda: split.Linear(WIDTH, rows))
        )
        for i in range(NUM_BLOCKS)
    ]
    state = StageState(made, optimizer.adamw())
    state.initialize(1)
    return state


def _name(stage: int, number: int) -> str:
    return f"s{stage}.b{number}"


def _serve(pipe: Connection, stage: int, size_bytes: int) -> None:
    torch.set_num_threads(1)
    state = _make_state(stage, size_bytes)
    server = HealServer(ADDRESS, lambda *_: state)
    pipe.send(server.address)
    pipe.recv()


@contextmanager
def _holders(size_bytes: int) -> Iterator[list[Source]]:
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for stage in HOLDERS:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, stage, size_bytes), daemon=True)
            process.start()
            started.append((process, ours))
        yield [Source(f"{i}/0", pipe.recv()) for i, (_, pipe) in enumerate(started)]
    finally:
        for process, _ in started:
            process.kill()
            process.join()


class _Joiner:
    """This process, and a state that is void until it is healed or made."""

    def __init__(self, size_bytes: int, sources: list[Source]) -> None:
        self._state = _make_state(LOST, size_bytes)
        self._beside = {stage: _make_state(stage, size_bytes) for stage in (LOST - 1, LOST + 1)}
        self._sources, self._client = sources, HealClient(ADDRESS)
        pairs = [(stage, i) for i in range(NUM_BLOCKS) for stage in self._beside]
        self._made = MadePosition(
            stage=LOST,
            blocks=tuple(
                MadeBlock(
                    block=_name(LOST, i),
                    sources=tuple(
                        BlockSource(
                            kind=SourceKind.NEIGHBOUR,
                            stage=stage,
                            block=_name(stage, i),
                            weight=0.5,
                        )
                        for stage, number in pairs
                        if number == i
                    ),
                )
                for i in range(NUM_BLOCKS)
            ),
        )

    def heal(self, num_sources: int) -> float:
        """Return the seconds that a copy of the whole state takes."""
        own = [s for s, stage in zip(self._sources, HOLDERS, strict=True) if stage == LOST]
        wanted = Wanted(QUORUM, LOST, 1)
        began_s = time.perf_counter()
        self._client.copy(self._state, sources=own[:num_sources], wanted=wanted, expected=NO_DIGEST)
        return time.perf_counter() - began_s

    def make(self) -> float:
        """Return the seconds until the state is made of the masters of both neighbours."""
        began_s = time.perf_counter()
        ours: Any = self  # stands for a plan, and for what allocates
        beside = BesideStates(ours)
        orders = [
            CopyOrder(
                (self._sources[HOLDERS.index(stage)],),
                Wanted(QUORUM, stage, 1, masters_only=True),
                NO_DIGEST,
            )
            for stage in self._beside
        ]
        beside.begin(self._client, ours, orders, lambda _: ())
        beside.clear(self._state, self._made, keeps_own=False)
        for order in orders:
            beside.copy(self._client, ours, *order)
        beside.make(self._state, self._made, keeps_own=False)
        return time.perf_counter() - began_s

    # As a plan, and as what allocates: memory is there, as it is for what is healed.

    ranks_per_stage, num_stages = 1, 3

    def build_beside(self, stage: int, *_: object, **__: object) -> StageState:
        """Return the memory for what is copied of a neighbour."""
        return self._beside[stage]


def measure(size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, one entry a round; the ways take turns.

    Args:
        size_bytes: of the state, moments included.
        rounds: that count; one more goes before them.
    """
    torch.set_num_threads(1)
    digests.warm_up()
    times: dict[str, list[float]] = {}
    with _holders(size_bytes) as sources:
        joiner = _Joiner(size_bytes, sources)
        ways = {
            "healed from one": lambda: joiner.heal(1),
            "healed from two": lambda: joiner.heal(2),
            "made of two": joiner.make,
        }
        names = [*ways]
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                took_s = ways[name]()
                if number:
                    times.setdefault(name, []).append(took_s)
    return times
