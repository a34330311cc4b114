"""Trains our Llama under torchrun: a plain module in a plain DDP loop, a checkpoint per step.

As torch's documentation of elastic training has it: after a restart every worker builds all anew,
loads the newest checkpoint and goes on. Each worker appends a line per step to its own file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mainstay_train.exact.draws import Address
from mainstay_train.model.workload import Workload
from mainstay_train.models import llama

SEED = 7


class Plain(nn.Module):
    """The workload's blocks, one after the other, as one module that gives the loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.specs = workload.blocks
        self.parts = nn.ModuleList(spec.build() for spec in workload.blocks)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, address: Address
    ) -> torch.Tensor:
        x = tokens
        for spec, part in zip(self.specs, self.parts, strict=True):
            x = part(x, address) if spec.draws else part(x)
        return self.specs[-1].loss_of(self.parts[-1], x, targets) / targets.numel()


def initialize(model: nn.Module) -> None:
    """Give every parameter a first value; the blocks' own ones are for Mainstay to set."""
    torch.manual_seed(SEED)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)


def main() -> None:
    """Train until killed."""
    directory, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = distributed.get_rank()
    workload = llama.workload(config)
    model = Plain(workload)
    initialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    checkpoint, step = directory / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    replicated = DistributedDataParallel(model)
    with (directory / f"steps-{rank}.jsonl").open("a", buffering=1) as log:
        while True:
            address = Address(SEED, step, rank, 0)
            batch = workload.dataset.batch(address)
            optimizer.zero_grad()
            replicated(batch.tokens, batch.targets, address).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if rank == 0:
                beside = checkpoint.with_suffix(".tmp")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step + 1}, beside)
                beside.replace(checkpoint)
            line = {"step": step, "at_s": time.time(), "pid": os.getpid()}
            log.write(json.dumps(line) + "\n")
            step += 1


if __name__ == "__main__":
    main()
