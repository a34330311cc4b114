"""A training loop of one's own: a plain nn.Module that guesses the next byte of a text.

The model knows nothing of Mainstay, and the loop is the usual one. What it gains: any of
its processes may be killed with -9 at any moment, and the bits stay those of a run in which
nothing had happened. docs/own-loop.md has the rules. Use it in a TrainingJob with

    workload:
      entrypoint: examples/own_loop.py:train
      config: {width: 128, context: 16}
"""

import torch
from torch import nn
from torch.nn import functional

import mainstay_train
from mainstay_train import data, optimizer


class NextByte(nn.Module):
    """An MLP over the last ``context`` bytes before each position."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(data.VOCAB_SIZE, width // 4)
        self.layers = nn.Sequential(
            nn.Linear(context * (width // 4), width),
            nn.GELU(),
            nn.Dropout(0.1),  # draws from torch's global generator, which each work sets
            nn.Linear(width, width),
            nn.GELU(),
        )
        self.out = nn.Linear(width, data.VOCAB_SIZE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next byte, [batch, sequence, 256], of int64 [batch, sequence]."""
        windows = functional.pad(tokens, (self.context - 1, 0)).unfold(1, self.context, 1)
        logits: torch.Tensor = self.out(self.layers(self.embedding(windows).flatten(2)))
        return logits


@mainstay_train.loop
def train(session: mainstay_train.LoopSession) -> None:
    """The entrypoint: `workload.config` of the TrainingJob is `session.config`."""
    config = {"width": 128, "context": 16, "sequence": 128, "samples": 8, "path": data.STDLIB}
    config |= session.config
    model = NextByte(config["width"], config["context"])
    session.register(
        model,
        optimizer=optimizer.each(torch.optim.AdamW, weight_decay=0.01),
        learning_rate=optimizer.warmup_cosine(
            peak=3e-3, warmup_steps=10, total_steps=session.num_steps
        ),
        clip_norm=1.0,
        data=data.ByteDataset(
            config["path"], sequence=config["sequence"], micro_batch_size=config["samples"]
        ),
    )
    for step in session.steps():
        for work in step.work():  # with detection.dmr.mode: Full twice, then as work.again
            # Random draws of one's own are addressed: the same for this work on any replica.
            noise = torch.rand(work.inputs.shape, generator=work.generator("noise"))
            inputs = work.inputs.masked_fill((noise < 0.05).to(session.device), 0)
            logits = model(inputs)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), work.targets.flatten(), reduction="sum"
            )
            loss.backward()
            work.done(loss, tokens=work.targets.numel())
        result = step.commit()
        if result is not None and session.leads and result.step % 10 == 9:
            print(f"step {result.step}: loss {result.loss:.3f}, gradient norm {result.norm:.3f}")
    if session.leads:
        print(f"done, {sum(p.numel() for p in model.parameters())} parameters trained")
