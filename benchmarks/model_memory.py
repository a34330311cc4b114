"""Measures what the built-in model takes in memory, and how far off bf16 gradients are.

    python benchmarks/model_memory.py [--sequences 1024 2048 4096] [--width 256] [--heads 4]

``attention`` and ``layer`` are forward and backward of one micro-batch in bf16, each in a process
of its own: the most resident memory that the kernel saw, above what was there before. So buffers
inside of kernels count. ``stage`` counts tensors, operation by operation: one shard type through
stages of more and more layers. ``gradient`` compares 64 micro-batches of products of bf16 operands
with fp64, in units of the bound (64 + tokens) x 2^-24 x the sum of absolute products.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402

from mainstay_core.base.ids import JobUid  # noqa: E402
from mainstay_core.base.shape import JobShape  # noqa: E402
from mainstay_core.job.config import JobConfig  # noqa: E402
from mainstay_core.planning.program import compile_compute  # noqa: E402
from mainstay_train.compute.engine import Engine  # noqa: E402
from mainstay_train.compute.loader import Loader  # noqa: E402
from mainstay_train.compute.measure import LiveBytes  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.exact.draws import Address  # noqa: E402
from mainstay_train.model import split, workload  # noqa: E402
from mainstay_train.models import attention  # noqa: E402

MEBIBYTE = 1024 * 1024
ADDRESS = Address(7, 0, 0, 0)
SMALL = {"dim": 64, "heads": 4, "kvHeads": 2, "hidden": 176, "sequence": 256}
MICRO_BATCHES, TOKENS = 64, 256
FORMS = ("flash", "explicit")


def peak_of(work: Callable[[], object]) -> int:
    """Return the most resident bytes while ``work`` runs, above those before."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak begins anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure_one(what: str, form: str, sequence: int, args: argparse.Namespace) -> int:
    """Return the peak of one forward and backward, in this process."""
    config = {
        "dim": args.width, "layers": 1, "heads": args.heads, "kvHeads": args.heads,
        "hidden": 2 * args.width, "dtype": "bfloat16", "attention": form,
    }  # fmt: skip
    head = args.width // args.heads

    def attend(length: int) -> None:
        qkv = torch.ones(1, length, 3 * args.width, dtype=torch.bfloat16, requires_grad=True)
        out = attention.attend(qkv, args.heads, args.heads, head, 10_000.0, form)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    def layer(length: int) -> None:
        model = workload.load("", {**config, "sequence": length})
        (block,) = model.build([1])
        x = torch.ones(1, length, args.width, dtype=torch.bfloat16)
        views = block.layout.views(torch.zeros(block.layout.size))
        tape = block.recompute(x, ADDRESS)
        block.backward_input(tape, torch.ones_like(x))
        block.backward_weight(tape, views)

    work = attend if what == "attention" else layer
    work(64)  # what libraries make once is there
    return peak_of(lambda: work(sequence))


def in_own_process(what: str, form: str, sequence: int) -> float:
    """Return :func:`measure_one` of another process, in MiB."""
    command = [sys.executable, *sys.argv, "--one", what, form, str(sequence)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) / MEBIBYTE


def print_sequences(args: argparse.Namespace) -> None:
    """Print what attention and a layer take, by the length of the sequence."""
    print("form       sequence   attention MiB   layer MiB")
    for form in FORMS:
        for sequence in args.sequences:
            alone, layer = (in_own_process(what, form, sequence) for what in ("attention", "layer"))
            print(f"{form:9}  {sequence:8}   {alone:13.1f}   {layer:9.1f}")


def print_stages() -> None:
    """Print what a stage takes by its layers, with and without recompute."""
    print("\nlayers   stage MiB   with recompute MiB")
    for layers in (2, 4, 8, 16):
        kept, again = (stage_peak(layers, recompute) / MEBIBYTE for recompute in (False, True))
        print(f"{layers:6}   {kept:9.2f}   {again:18.2f}")


def stage_peak(layers: int, recompute: bool) -> int:
    """Return the most bytes of activations of one type through one stage."""
    shape = JobShape(
        lanes=1, shards_per_lane=1, replicas=1, min_replicas=1, stages=1, steps=1, seed=7
    )
    config = JobConfig(
        job=JobUid("memory"),
        name="memory",
        shape=shape,
        entrypoint="",
        workload={**SMALL, "layers": layers},
        recompute=recompute,
    )
    model = workload.load("", config.workload)
    loader = Loader(model.dataset, ahead=False)
    engine = Engine.build(
        model, config, loader, stage=0, num_stages=1, device="cpu", hook=lambda _: None
    )
    engine.state.initialize(7)
    assert engine.interpreter is not None
    program = compile_compute([0], 1, 0, 1)
    engine.interpreter.run(program, 0, None)
    engine.drop_held()  # its buffers stay: what comes next is activations alone
    with LiveBytes() as live:
        engine.interpreter.run(program, 0, None)
    return int(live.peak)


def print_gradient(width: int) -> None:
    """Print the largest error of accumulated gradients, in units of the bound."""
    total, rounded = torch.zeros(2, width, width)
    exact, size = torch.zeros(2, width, width, dtype=torch.float64)
    for number in range(MICRO_BATCHES):
        random = Address(7, 0, 0, number).generator("operands")
        dy, x = (torch.randn(TOKENS, width, generator=random).bfloat16() for _ in range(2))
        split.add_product(total, dy, x, number > 0)
        rounded += torch.mm(dy.t(), x)
        exact += dy.double().t() @ x.double()
        size += dy.double().abs().t() @ x.double().abs()
    bound = (MICRO_BATCHES + TOKENS) * 2.0**-24 * size
    ours, before = (float(((t - exact).abs() / bound).max()) for t in (total, rounded))
    print(f"\ngradient of {MICRO_BATCHES} x {TOKENS} tokens, {width} x {width}: error / bound")
    print(f"products summed in fp32 {ours:.4f}, products rounded to bf16 {before:.1f}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    numerics.setup("cpu")
    if args.one is not None:
        what, form, sequence = args.one
        print(measure_one(what, form, int(sequence), args))
        return
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread, bf16")
    print_sequences(args)
    print_stages()
    print_gradient(args.width)


if __name__ == "__main__":
    main()
