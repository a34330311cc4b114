"""Causal attention with grouped queries and rotary positions, and dropout by address.

Two explicit matrix products around a softmax: on CPU it is no slower than the fused
kernel at these sizes, and every product is a separate operation that can be run
again and compared. Its scores take sequence^2 elements per head.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from mainstay_train.exact.draws import Address


def attend(
    qkv: torch.Tensor, heads: int, kv_heads: int, width: int, rope_base: float
) -> torch.Tensor:
    """Map [batch, sequence, (heads + 2 kv_heads) * width] to [batch, sequence, heads * width].

    Args:
        qkv: queries, keys and values of a token one behind the other.
        heads: of the queries.
        kv_heads: of keys and values; divides ``heads``.
        width: of one head.
        rope_base: base of the rotary frequencies.
    """
    batch, length, _ = qkv.shape
    group = heads // kv_heads
    parts = qkv.view(batch, length, heads + 2 * kv_heads, width)
    rotated = _rotate(
        parts[:, :, : heads + kv_heads], _rotations(length, width, rope_base, qkv.device)
    )
    # Queries that share a key head become rows of one product.
    q = rotated[:, :, :heads].view(batch, length, kv_heads, group, width)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * length, width)
    k = rotated[:, :, heads:].transpose(1, 2).reshape(-1, length, width)
    v = parts[:, :, heads + kv_heads :].transpose(1, 2).reshape(-1, length, width)
    mask = _causal_mask(length, group, qkv.device, qkv.dtype)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=width**-0.5)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(qkv.dtype)
    out = torch.bmm(weights, v).view(batch, kv_heads, group, length, width)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads * width)


def drop(x: torch.Tensor, address: Address, site: str, rate: float) -> torch.Tensor:
    """Dropout whose draws are addressed: equal on every rank that has all of ``x``."""
    if rate == 0.0:
        return x
    kept = address.uniform(x.shape, site, x.device) >= rate
    return x * kept.to(x.dtype) / (1 - rate)


def _rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of [batch, sequence, heads, width] by their position, in fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)


@lru_cache(maxsize=8)
def _rotations(length: int, width: int, base: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers [length, 1, width / 2], angles computed in fp64 on CPU."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)[:, None]


@lru_cache(maxsize=8)
def _causal_mask(length: int, group: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[group * length, length]: 0 up to the own position, minus infinity after it."""
    mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
    return mask.repeat(group, 1).to(device)
