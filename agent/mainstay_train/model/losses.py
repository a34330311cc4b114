"""Losses as sums over tokens, in fp32, that never hold the fp32 logits of a whole micro-batch.

A token's loss is computed from its own logits, so tokens go in chunks. The backward computes a
chunk's logits again from what was given. It needs one number per token for that, the logarithm of
the sum of exponentials (Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
2024, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from mainstay_train.model import split

IGNORED_TARGET = -100
"""Targets of this value count neither in the loss nor in the number of tokens."""

CHUNK_ELEMENTS = 1 << 24
"""Logits that are in fp32 at a time: 64 MiB, which are 512 tokens with a vocabulary of 32,768.
Bits depend on where the loss is cut, so it is in the fingerprint."""


def cross_entropy_sum(
    logits: torch.Tensor, targets: torch.Tensor, chunk_elements: int = CHUNK_ELEMENTS
) -> torch.Tensor:
    """Cross entropy summed over tokens, in fp32.

    A sum, because a mean would divide by a count that depends on the micro-batch;
    the division by the global count happens once, after the reduction.

    Args:
        logits: [..., vocab].
        targets: int64 [...].
        chunk_elements: logits that are in fp32 at a time.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropy.apply(flat, targets.reshape(-1), chunk_elements)  # type: ignore[no-any-return,no-untyped-call]


class ProjectedCrossEntropy(split.SplitModule):
    """The last projection, without a bias, and :func:`cross_entropy_sum` of its logits, as one.

    Logits exist for a chunk of tokens at a time, in no type all of them. Where a micro-batch is one
    chunk the gradient of its logits is kept for the weight; else it is computed again.

    Args:
        in_features: width of what is projected.
        vocab: number of classes.
        chunk_elements: logits that are there at a time.
    """

    def __init__(
        self, in_features: int, vocab: int, *, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, in_features))
        self.chunk_elements = chunk_elements
        self.vocab = vocab
        self.first = 0
        """Class of the weight's first row: not 0 where other ranks have those before."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the fp32 sum for [..., in_features] and int64 targets [...]."""
        recorder = split.current()
        if recorder is None:
            flat = x.reshape(-1, x.shape[-1])
            logits = self.gathered(functional.linear(flat, self.weight))
            return cross_entropy_sum(logits, targets, self.chunk_elements)
        return _Projected.apply(x, recorder.anchor, self, targets.reshape(-1), recorder)  # type: ignore[no-any-return,no-untyped-call]

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all classes of some tokens, from those of the weight's rows."""
        return logits


def _chunks(count: int, width: int, most: int) -> Iterator[slice]:
    """Cut ``count`` rows of ``width`` elements into chunks of at most ``most``, a row at least."""
    rows = max(1, most // width)
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


def _chosen(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the logit of each token's target, 0 where that is ignored; targets [n, 1]."""
    counts = targets != IGNORED_TARGET
    return logits.gather(1, torch.where(counts, targets, 0)).masked_fill_(~counts, 0)


def _sum_of(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of fp32 logits and the logarithm of each token's sum of exponentials."""
    targets = targets[:, None]
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    apart = log_sum.masked_fill(targets == IGNORED_TARGET, 0) - _chosen(logits, targets)
    return apart.sum(), log_sum


def _gradient(
    logits: torch.Tensor, log_sum: torch.Tensor, targets: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Turn fp32 logits, which are overwritten, into the gradient of their cross entropy.

    Args:
        logits: [n, width], of the classes from ``first`` on.
        log_sum: [n, 1], over all classes.
        targets: int64 [n].
        first: class of the first column.
    """
    logits.sub_(log_sum).exp_()
    columns = targets - first
    here = (columns >= 0) & (columns < logits.shape[1])
    # An ignored token and a target elsewhere subtract nothing from the first column.
    tokens = torch.arange(len(targets), device=targets.device)
    places = (tokens, torch.where(here, columns, 0))
    logits[places] = logits[places] - here.to(logits.dtype)
    return logits.masked_fill_((targets == IGNORED_TARGET)[:, None], 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, most):  # type: ignore[no-untyped-def]
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        log_sums = []
        for rows in _chunks(len(logits), logits.shape[1], most):
            part, log_sum = _sum_of(logits[rows].float(), targets[rows])
            total += part
            log_sums.append(log_sum)
        ctx.save_for_backward(logits, targets, torch.cat(log_sums))
        ctx.most = most
        return total

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        logits, targets, log_sum = ctx.saved_tensors
        dx = torch.empty_like(logits)
        for rows in _chunks(len(logits), logits.shape[1], ctx.most):
            wide = logits[rows].to(torch.float32, copy=True)
            dx[rows] = _gradient(wide, log_sum[rows], targets[rows]).mul_(dy)
        return dx, None, None


class _Projected(torch.autograd.Function):
    """The gradient of the input is computed with the loss: so logits are made once for both.

    Where the module has some rows of the weight, it is this rank's term of that gradient.
    """

    @staticmethod
    def forward(ctx, x, anchor, module, targets, recorder):  # type: ignore[no-untyped-def] # noqa: ARG004
        flat, weight = x.reshape(-1, x.shape[-1]), module.weight
        dx = torch.empty_like(flat)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        log_sums, kept = [], None
        chunks = list(_chunks(len(flat), module.vocab, module.chunk_elements))
        for rows in chunks:
            logits = module.gathered(torch.mm(flat[rows], weight.t())).float()
            part, log_sum = _sum_of(logits, targets[rows])
            total += part
            log_sums.append(log_sum)
            own = logits.narrow(1, module.first, len(weight)).contiguous()
            del logits
            gradient = _gradient(own, log_sum, targets[rows], module.first).to(x.dtype)
            del own
            torch.mm(gradient, weight, out=dx[rows])
            kept = gradient if len(chunks) == 1 else None
            del gradient
        ctx.held = (flat, dx, module, targets, torch.cat(log_sums), kept, recorder)
        ctx.shape = x.shape
        return total

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        flat, dx, module, targets, log_sum, kept, recorder = ctx.held
        del ctx.held  # the input's gradient goes when the next module has used it
        weight = module.weight

        def weight_gradient(view: torch.Tensor, add: bool) -> None:
            if kept is not None:
                split.add_product(view, kept.mul_(dy), flat, add)
                return
            for classes in _chunks(len(weight), len(flat), module.chunk_elements):
                logits = torch.mm(flat, weight[classes].t()).float()
                first = module.first + classes.start
                gradient = _gradient(logits, log_sum, targets, first).mul_(dy)
                gradient = gradient.to(flat.dtype)
                del logits
                split.add_product(view[classes], gradient, flat, add)
                del gradient

        recorder.defer(weight, weight_gradient)
        return dx.view(ctx.shape).mul_(dy), None, None, None, None
