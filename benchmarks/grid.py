"""Measures what the chunk grid costs a rank's processor: reduction, norms and digests of a step.

    python benchmarks/grid.py [--ranks 2] [--rounds 20] [--bucket-mebibytes 4] [--width 256]

Each round does every part in three forms by turns: chunk by chunk as it once was, by buckets in
batches of torch's operations, and by buckets in compiled code (which reductions do not have).
``ms`` is the processor time of the thread, median: other work on the machine hardly changes it.
``operations`` are those that reach torch's dispatcher, views among them: what the host does when
the arithmetic is a GPU's, in whose batches buckets go there. The other ranks are played: nothing is
sent. All forms must have the same sums and digests, and those by buckets the same norms; chunk by
chunk norms are nearly the same. Or the benchmark fails.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from support import by_chunk  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mainstay_core.base.digest import Digest  # noqa: E402
from mainstay_core.rank.steps.step_plan import Supply  # noqa: E402
from mainstay_core.wire.plan import Partial  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.exact.gradients import GradientSums  # noqa: E402
from mainstay_train.exact.layout import BlockLayout, StageLayout  # noqa: E402
from mainstay_train.exact.reduction import Reducer  # noqa: E402
from mainstay_train.sums import compiled, digests  # noqa: E402
from mainstay_train.sums.digests import FlatDigest  # noqa: E402
from mainstay_train.sums.rows import Piece  # noqa: E402

WARM_UP_ROUNDS = 2
LAYERS = 4
MEBIBYTE = 1024 * 1024
COLUMNS = (
    "ms by chunk", "ms in batches", "ms compiled", "by chunk / in batches", "by chunk / compiled",
    "operations by chunk", "by bucket",
)  # fmt: skip
Form = Callable[[], object]


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += 1
        return func(*args, **(kwargs or {}))


class Played:
    """A group as rank 0 sees it: the others send zeros, at once and at no cost."""

    def __init__(self) -> None:
        self._zeroed: dict[int, tuple[int, ...]] = {}

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """Nothing is on its way but what a rank sends to itself."""
        sizes = tuple(received_sizes)
        if self._zeroed.get(received.data_ptr()) != sizes:
            self._zeroed[received.data_ptr()] = sizes
            received.zero_()
        received[: received_sizes[0]].copy_(sent[: sent_sizes[0]])

    def finish_exchange(self, exchange: None) -> None:
        """It is over already."""


def make_layout(width: int) -> StageLayout:
    """A Llama's blocks; 256 wide they have 3.5e6 parameters."""
    hidden = width * 11 // 4
    layer = {
        "attention_norm": (width,),
        "qkv": (3 * width, width),
        "out": (width, width),
        "ffn_norm": (width,),
        "gate_up": (2 * hidden, width),
        "down": (width, hidden),
    }
    return StageLayout(
        blocks=(
            BlockLayout.of("embedding", {"weight": (1200, width)}),
            *(BlockLayout.of(f"layers.{i}", layer) for i in range(LAYERS)),
        )
    )


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Have what is made meanwhile go by batches of torch's operations."""
    load = compiled.load
    compiled.load = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        compiled.load = load


def make_parts(
    layout: StageLayout, ranks: int, bucket_bytes: int, device: str = "cpu"
) -> dict[str, tuple[Form, Form]]:
    """By part of a step: by buckets, and chunk by chunk.

    On "meta" tensors have no elements, and the first forms ask for what they ask for of a GPU.
    """
    group = None if ranks == 1 else Played()
    table = [Supply(partial=Partial(lane=i, first=i, last=i), index=i) for i in range(ranks)]
    members = list(range(ranks))
    reducer = Reducer(layout, device, bucket_bytes)
    torch.manual_seed(1)
    own = {table[0].partial: layout.allocate(device=device).normal_()}
    sent, reduced, masters = (layout.allocate(device=device).normal_() for _ in range(3))
    gradients = GradientSums(layout, reducer.bounds, device=device)
    by_block = [
        FlatDigest([Piece(f"master:{p.name}", p.offset, p.numel) for p in block.params], device)
        for block in layout.blocks
    ]

    def sum_by_bucket() -> object:
        return reducer.reduce(group, table, members, 0, own)  # type: ignore[arg-type]

    def norms_by_bucket() -> object:
        gradients.begin()
        return [part.norms.squares(reduced[part.within]) for part in gradients.parts]

    def gradient_by_bucket() -> object:
        return gradients.sums(reduced)

    def partial_by_bucket() -> object:
        return gradients.sums(sent)

    def masters_by_bucket() -> object:
        views = layout.block_views(masters)
        return [known.sums(view) for known, view in zip(by_block, views, strict=True)]

    chunk_reducer = by_chunk.ChunkReducer(layout)

    def flat_by_chunk(flat: torch.Tensor) -> Digest:
        names = (f"gradient:{block.name}" for block in layout.blocks)
        return by_chunk.digest_tensors(zip(names, layout.block_views(flat), strict=True))

    def masters_by_chunk() -> Digest:
        views = layout.views(masters)
        return by_chunk.digest_tensors((f"master:{name}", v) for name, v in views.items())

    return {
        "reduction": (
            sum_by_bucket,
            lambda: chunk_reducer.reduce(group, table, members, 0, own),
        ),
        "norms": (
            norms_by_bucket,
            lambda: [by_chunk.chunk_norms_sq(view) for view in layout.block_views(reduced)],
        ),
        "digest of the partial": (partial_by_bucket, lambda: flat_by_chunk(sent)),
        "digest of the gradient": (gradient_by_bucket, lambda: flat_by_chunk(reduced)),
        "digest of the masters": (masters_by_bucket, masters_by_chunk),
    }


def agree(name: str, found: Any, expected: Any) -> bool:
    """Whether both forms of a part come to the same."""
    if name == "reduction":  # what another rank sums is zero here, and whose that is differs
        both = (found != 0) & (expected != 0)
        return bool(both.any()) and torch.equal(found[both], expected[both])
    if name == "norms":  # each form has an order of its own
        total = sum(float(squares.sum()) for squares in found)
        return math.isclose(total, sum(map(sum, expected)), rel_tol=1e-12)
    return digests.added(found) == expected


def measure(form: Form) -> float:
    """Return the thread's processor time, in seconds."""
    began = time.thread_time()
    form()
    return time.thread_time() - began


def count(form: Form) -> int:
    """Return the operations that reach the dispatcher."""
    with Operations() as seen:
        form()
    return seen.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bucket-mebibytes", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    numerics.setup("cpu")
    digests.warm_up()
    layout = make_layout(args.width)
    options = layout, args.ranks, args.bucket_mebibytes * MEBIBYTE
    parts = make_parts(*options)
    with without_compiled_code():
        in_batches = make_parts(*options)
    forms = {name: (former, in_batches[name][0], form) for name, (form, former) in parts.items()}
    for name, (former, batches, form) in forms.items():
        found = form()
        if not agree(name, found, former()) or not same(found, batches()):
            raise SystemExit(f"{name}: the forms differ")
    times: dict[str, list[list[float]]] = {name: [] for name in parts}
    for turn in range(args.rounds + WARM_UP_ROUNDS):
        for name, several in forms.items():
            row = [0.0] * len(several)
            for place in range(len(several)):  # whoever comes second finds the data in a cache
                which = (place + turn) % len(several)
                row[which] = measure(several[which])
            if turn >= WARM_UP_ROUNDS:
                times[name].append(row)
    print(f"{layout.size} elements, {args.ranks} ranks, buckets of {args.bucket_mebibytes} MiB;")
    print(f"load average {os.getloadavg()[0]:.1f}\n")
    print(f"| part | {' | '.join(COLUMNS)} |")
    print("| --- |" + " --- |" * len(COLUMNS))
    counted = make_parts(*options, "meta")
    rows = []
    for name, (form, _) in counted.items():
        form()  # what is made once is there
        ms = [statistics.median(column) * 1e3 for column in zip(*times[name], strict=True)]
        rows.append([*ms, count(parts[name][1]), count(form)])
        show(name, rows[-1])
    show("together", [sum(column) for column in zip(*rows, strict=True)])


def same(found: Any, expected: Any) -> bool:
    """Whether both forms by buckets have the same bits."""
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    return all(map(torch.equal, found, expected))


def show(name: str, row: Sequence[float]) -> None:
    """Print a row of the table."""
    by_chunk_ms, batches_ms, compiled_ms, asked, asks = row
    print(
        f"| {name} | {by_chunk_ms:.2f} | {batches_ms:.2f} | {compiled_ms:.2f} "
        f"| {by_chunk_ms / batches_ms:.2f} | {by_chunk_ms / compiled_ms:.2f} "
        f"| {asked:.0f} | {asks:.0f} |"
    )


if __name__ == "__main__":
    main()
