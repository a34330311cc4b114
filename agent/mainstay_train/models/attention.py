"""Causal attention with grouped queries and rotary positions, and dropout by address.

Two forms, which ``workload.config.attention`` chooses between. *Flash* is torch's
``scaled_dot_product_attention`` with its flash kernel pinned: scores exist for a tile at a time
(Dao et al., "FlashAttention", 2022, section 3.1). *Explicit* is two matrix products around a
softmax, whose scores take sequence^2 elements per head: the reference, and for devices without that
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mainstay_core.base.errors import InvalidSpecError, brief
from mainstay_train.exact.draws import Address

AUTO, FLASH, EXPLICIT = "auto", "flash", "explicit"
FORMS = (AUTO, FLASH, EXPLICIT)
"""Values of ``workload.config.attention``."""
Attend = Callable[[torch.Tensor, int, int, int, float, str], torch.Tensor]
PATH = "workload.config.attention"
_PROBED_LENGTH = 130
"""Tokens that :func:`check` takes: more than a tile of the kernels, and no multiple of one."""


def choose(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the form in use: ``auto`` is flash where there is a kernel of the type."""
    if wanted != AUTO:
        return wanted
    return EXPLICIT if device.type == "cuda" and dtype == torch.float32 else FLASH


def check(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    compute: Attend | None = None,
) -> str:
    """Return the form in use, after it was tried: there, and with the same bits twice.

    Args:
        wanted: one of :data:`FORMS`.
        device: where it computes.
        dtype: of queries, keys and values.
        heads: of the queries.
        kv_heads: of keys and values.
        width: of one head.
        compute: what is tried; None: :func:`attend`.

    Raises:
        InvalidSpecError: the device has no such kernel, or its bits vary.
    """
    form = choose(wanted, device, dtype)
    shape = (1, _PROBED_LENGTH, (heads + 2 * kv_heads) * width)
    what = f"{form} attention of {dtype} with heads of width {width} on {device.type}"
    qkv = torch.linspace(-1, 1, shape[1] * shape[2], dtype=torch.float32).view(shape)
    qkv = qkv.to(device, dtype).requires_grad_()
    found = []
    for _ in range(2):
        try:
            out = (compute or attend)(qkv, heads, kv_heads, width, 10_000.0, form)
            found.append((out, torch.autograd.grad(out, qkv, out.detach())[0]))
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise  # of the device or its memory: another device may do
            raise InvalidSpecError(
                PATH,
                f"is {wanted!r}, but this torch has no {what} whose backward is deterministic "
                f"({brief(error)}); use {EXPLICIT!r}, which every device has",
            ) from error
    if not all(map(torch.equal, *found)):
        raise InvalidSpecError(
            PATH, f"is {wanted!r}, but two runs of {what} have other bits; use {EXPLICIT!r}"
        )
    return form


def attend(
    qkv: torch.Tensor, heads: int, kv_heads: int, width: int, rope_base: float, form: str
) -> torch.Tensor:
    """Map [batch, sequence, (heads + 2 kv_heads) * width] to [batch, sequence, heads * width].

    Args:
        qkv: queries, keys and values of a token one behind the other.
        heads: of the queries.
        kv_heads: of keys and values; divides ``heads``.
        width: of one head.
        rope_base: base of the rotary frequencies.
        form: one of :data:`FORMS`.

    Raises:
        RuntimeError: there is no such kernel.
    """
    batch, length, _ = qkv.shape
    parts = qkv.view(batch, length, heads + 2 * kv_heads, width)
    rotated = _rotate(
        parts[:, :, : heads + kv_heads], _rotations(length, width, rope_base, qkv.device)
    )
    q, k, v = rotated[:, :, :heads], rotated[:, :, heads:], parts[:, :, heads + kv_heads :]
    if choose(form, qkv.device, qkv.dtype) == FLASH:
        return _flash(q, k, v)
    return _explicit(q, k, v)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend; each of [batch, sequence, heads, width]."""
    # Pinned: torch would choose by shapes, and fall back in silence.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2).flatten(2)


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend; each of [batch, sequence, heads, width]."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Queries that share a key head become rows of one product.
    q = q.reshape(batch, length, kv_heads, group, width)
    q = q.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * length, width)
    k = k.transpose(1, 2).reshape(-1, length, width)
    v = v.transpose(1, 2).reshape(-1, length, width)
    mask = _causal_mask(length, group, q.device, q.dtype)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=width**-0.5)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights, v).view(batch, kv_heads, group, length, width)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, length, heads * width)


def drop(x: torch.Tensor, address: Address, layer: str, place: str, rate: float) -> torch.Tensor:
    """Dropout whose draws are addressed: equal on every rank that has all of ``x``.

    Args:
        x: of any shape.
        address: of the micro-batch.
        layer: names the layer. It is looked at only where something is dropped: compiled code is
            one for all layers then.
        place: names the place in it.
        rate: share of elements that are dropped.
    """
    if rate == 0.0:
        return x
    kept = address.uniform(x.shape, f"{layer}.{place}", x.device) >= rate
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
