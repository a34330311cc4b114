"""Measures a step on one GPU: plain torch, and local runs of the same model on the same GPU.

    python benchmarks/one_gpu.py [--rounds 30] [--width 1024] [--layers 16]

The plain step has our blocks and settings of torch, and nothing else of ours: one bf16 module,
autograd through all of it, gradients that add up in bf16, fp32 masters, fused AdamW, kernels of any
order or deterministic ones. The others are local runs of one rank over NCCL,
with supervisor, api and Redis: from commit to commit, medians, without and with checks, which in
mode Piggyback need that forwards are recomputed. Nothing runs beside anything else. Without a GPU
it says so and ends.
"""

from __future__ import annotations

from mainstay_train.base import environment

environment.prepare()  # before torch is imported

import argparse  # noqa: E402
import itertools  # noqa: E402
import multiprocessing  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from support.local_run import local_run, make_job  # noqa: E402
from support.torchrun_llama import Plain, initialize  # noqa: E402
from torch import nn  # noqa: E402

from mainstay_train.base import device as devices  # noqa: E402
from mainstay_train.exact import numerics  # noqa: E402
from mainstay_train.exact.draws import Address  # noqa: E402
from mainstay_train.model import workload  # noqa: E402

SEED = 7
LEARNING_RATE = 1e-4
WARM_UP_STEPS = 5
MICRO_BATCHES = 2
SEQUENCES = 8
"""Of a micro-batch."""
SEQUENCE = 1024
ROWS = (
    ("local run", "Off", False),
    ("local run, checks Full", "Full", False),
    ("local run, forwards recomputed", "Off", True),
    ("local run, forwards recomputed, checks Piggyback", "Piggyback", True),
)
"""Name, mode of checks, whether forwards are recomputed."""
TOKENS = MICRO_BATCHES * SEQUENCES * SEQUENCE


def make_model(width: int, layers: int) -> dict[str, Any]:
    """Return the Llama's configuration: heads of width 64, bf16."""
    heads = max(1, width // 64)
    return {
        "dim": width,
        "layers": layers,
        "heads": heads,
        "kvHeads": max(1, heads // 4),
        "hidden": width * 11 // 4,
        "sequence": SEQUENCE,
        "microBatchSize": SEQUENCES,
        "dtype": "bfloat16",
        "data": {"path": "stdlib"},
    }


def run_plain(pipe: Connection, model: dict[str, Any], rounds: int) -> None:
    """Send (seconds of each step by kind of kernels, number of parameters)."""
    device = numerics.setup("cuda")
    loaded = workload.load("", model)
    module = Plain(loaded)
    initialize(module)
    module.to(device, torch.bfloat16)
    parameters = list(module.parameters())
    masters = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (rounds + WARM_UP_STEPS)):
        exact = number % 2 == 1
        torch.use_deterministic_algorithms(exact)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for index in range(MICRO_BATCHES):
            address = Address(SEED, number, 0, index)
            batch = loaded.dataset.batch(address)
            tokens, targets = (devices.sent(t, device) for t in (batch.tokens, batch.targets))
            (module(tokens, targets, address) / MICRO_BATCHES).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(tuple(parameters), tuple(masters))
        torch.cuda.synchronize()
        if number >= 2 * WARM_UP_STEPS:
            seconds[exact].append(time.perf_counter() - began_s)
    pipe.send((seconds, sum(parameter.numel() for parameter in parameters)))


def measure_plain(model: dict[str, Any], rounds: int) -> tuple[dict[bool, list[float]], int]:
    """Run the plain step in a process of its own: it leaves the GPU to the others."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_plain, args=(theirs, model, rounds))
    process.start()
    theirs.close()
    told: tuple[dict[bool, list[float]], int] = ours.recv()
    process.join()
    return told


def measure_run(
    model: dict[str, Any], rounds: int, checks: str = "Off", recompute: bool = False
) -> list[float]:
    """Return the seconds from commit to commit of a local run."""
    job = make_job(
        "gpu",
        training={"steps": 1_000_000, "seed": SEED, "lanes": 1, "shardsPerLane": 1},
        pipeline={"microBatches": MICRO_BATCHES},
        runtime={"device": "CUDA", "backend": "NCCL", "recompute": recompute},
        detection={"dmr": {"mode": checks}},
        workload={"entrypoint": "mainstay_train.models.llama:workload", "config": model},
    )
    with local_run(job, poll_s=1.0) as run:
        run.members(1)
        run.go_on(WARM_UP_STEPS)
        first = run.newest()
        run.go_on(rounds)
        ends = [run.steps[n].committed_at_s for n in range(first, run.newest() + 1)]
    return [after - before for before, after in itertools.pairwise(ends)]


def show(what: str, seconds: Sequence[float], least_s: float) -> None:
    """Print one row."""
    middle = statistics.median(seconds)
    print(
        f"| {what} | {middle * 1e3:.1f} | {TOKENS / middle:,.0f} | {middle / least_s:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="steps of each row (30)")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no CUDA device here")
        return
    model = make_model(options.width, options.layers)
    plain, count = measure_plain(model, options.rounds)
    least_s = statistics.median(plain[False])
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {count / 1e6:.0f} million "
        f"parameters, {TOKENS:,} tokens a step\n"
    )
    print("| step | ms | tokens a second | of plain torch |\n| --- | --- | --- | --- |")
    show("plain torch, kernels of any order", plain[False], least_s)
    show("plain torch, deterministic kernels", plain[True], least_s)
    for what, checks, recompute in ROWS:
        show(what, measure_run(model, options.rounds, checks, recompute), least_s)


if __name__ == "__main__":
    main()
